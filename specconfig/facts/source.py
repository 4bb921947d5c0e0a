"""Where facts about a checkpoint come from, and how they become a ``ModelConfig``.

Facts are the ``config.json`` dict of a checkpoint (GGUF headers are translated to the same keys).
Nothing else is read, and no weight is opened. Tests and callers may inject their own source.
"""

from __future__ import annotations

import copy
import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from specconfig.errors import FactsUnavailable
from specconfig.facts.gguf_header import read_gguf_facts

Facts = dict[str, Any]
FactsSource = Callable[[str, str | None], Mapping[str, Any]]

GENERATION_KEY = "__generation_config__"
"""Extra key under which a source may return generation_config.json (for its eos ids)."""


def expand(path: str) -> str:
    """``~`` and environment variables expanded, as a shell would."""
    # Not Path.expanduser: that would also rewrite "https://" and raise for unknown users.
    return os.path.expanduser(os.path.expandvars(path))  # noqa: PTH111


def is_dotted_path(model: str | None) -> bool:
    """Whether ``model`` reads as ``package.module.Class`` rather than as a path or an id."""
    if model is None or "/" in model or urlparse(model).scheme in ("http", "https", "file"):
        return False
    parts = model.split(".")
    return len(parts) >= 2 and all(part.isidentifier() for part in parts)


def _read_json(path: Path, model: str) -> Facts:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FactsUnavailable(
            "model",
            model,
            "a directory with a readable config.json",
            f"repair {path.name}: {error}",
        ) from error
    if not isinstance(loaded, dict):
        raise FactsUnavailable("model", model, "a config.json that holds an object", "")
    return loaded


def _read_directory(directory: Path, model: str) -> Facts:
    facts = _read_json(directory / "config.json", model)
    generation = directory / "generation_config.json"
    if generation.is_file():
        facts[GENERATION_KEY] = _read_json(generation, model)
    return facts


def reachable(endpoint: str) -> bool:
    """Whether the hub's host has an address. Through a proxy this cannot be known, so True.

    Asked before a download because the hub client retries for half a minute without a network.
    """
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True
    try:
        socket.getaddrinfo(urlparse(endpoint).hostname, None)
    except OSError:
        return False
    return True


def _hub_file(model: str, filename: str, revision: str | None) -> Path | None:
    """Local copy of one small file: from the cache, else downloaded; None when there is none."""
    # Imported here: the hub client is only needed for ids that are not local.
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    cached = try_to_load_from_cache(model, filename, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    # A non-string answer is the hub's remembered "no such file".
    if cached is not None or constants.HF_HUB_OFFLINE or not reachable(constants.ENDPOINT):
        return None
    try:
        return Path(hf_hub_download(model, filename, revision=revision))
    except (HfHubHTTPError, OSError):
        return None


def _read_hub(model: str, revision: str | None) -> Facts:
    from huggingface_hub.errors import HFValidationError

    try:
        config = _hub_file(model, "config.json", revision)
    except HFValidationError as error:
        raise FactsUnavailable(
            "model",
            model,
            "a local directory, a .gguf file or a hub id 'org/name'",
            f"check the path: it does not exist here ({error})",
        ) from error
    if config is None:
        raise FactsUnavailable(
            "model",
            model,
            "a local directory, a .gguf file, or a hub id that is cached or reachable",
            "check the name and the network, or download the model first",
            message=f"no config.json found for {model!r}",
        )
    facts = _read_json(config, model)
    # A missing generation config is normal; the eos ids then come from config.json.
    generation = _hub_file(model, "generation_config.json", revision)
    if generation is not None:
        facts[GENERATION_KEY] = _read_json(generation, model)
    return facts


def default_facts(model: str, revision: str | None) -> Facts:
    """Facts of a local directory, a GGUF file, or a hub id (local cache first)."""
    path = Path(expand(model))
    if path.is_dir():
        return _read_directory(path, model)
    if path.is_file():
        if path.suffix == ".gguf":
            return read_gguf_facts(path)
        raise FactsUnavailable(
            "model",
            model,
            "a directory with config.json, a .gguf file, or a hub id",
            "point at the directory that holds config.json",
        )
    if model.startswith(("/", ".", "~", "$")):
        raise FactsUnavailable("model", model, "an existing path", "check the path")
    return _read_hub(model, revision)


class TokenizerFiles:
    """The small files of a tokenizer: in a directory, or of a hub id (local cache first)."""

    def __init__(self, location: str, revision: str | None) -> None:
        self._location, self._revision = location, revision
        self._folder = Path(expand(location))
        self._is_hub = not self._folder.exists() and not location.startswith(("/", ".", "~", "$"))

    def text(self, name: str) -> str:
        """A file's text; '' where it is not there or cannot be read."""
        path: Path | None = self._folder / name
        try:
            if self._is_hub:
                path = _hub_file(self._location, name, self._revision)
            return path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
        except (OSError, ValueError):  # of the hub client too: what is no id
            return ""

    def json(self, name: str) -> dict[str, Any]:
        """A file's object; {} where there is none."""
        try:
            loaded = json.loads(self.text(name) or "{}")
        except ValueError:
            return {}
        return loaded if isinstance(loaded, dict) else {}


def load_facts(source: FactsSource | None, model: str, revision: str | None, field: str) -> Facts:
    """A private, mutable copy of a model's facts; errors name ``field``."""
    read = source or default_facts
    try:
        return copy.deepcopy(dict(read(model, revision)))
    except FactsUnavailable as error:
        raise FactsUnavailable(field, model, error.allowed, error.fix) from error
    except KeyError as error:
        raise FactsUnavailable(
            field, model, "a model the facts source knows", f"the source has no entry {error}"
        ) from error
