"""A Serve config file as the `paceline` command takes it: read, overridden, checked."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from actors.memory import available_bytes
from deploy.errors import UserError
from parallel.placement import place_replica
from specconfig.engine import EngineConfig
from specconfig.explaining.explain import explain_file
from specconfig.explaining.explanation import AppExplanation
from specconfig.explaining.serve_rules import BUILDER

DEFAULT_PORT: Final = 8000
# Ray's own processes, the Serve controller, proxy and ingress, and the engine's code.
_BASE_MIB: Final = 2500


@dataclass(frozen=True, slots=True)
class ServeFile:
    """A Serve config file, read and checked."""

    config: dict[str, Any]
    host: str
    port: int
    apps: tuple[AppExplanation, ...] = ()

    @property
    def url(self) -> str:
        """Where clients on this machine reach it."""
        prefix = str(self.config["applications"][0].get("route_prefix") or "/").rstrip("/")
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}{prefix}"

    @property
    def app_names(self) -> list[str]:
        return [str(app.get("name", "default")) for app in self.config["applications"]]


def read_serve_file(
    path: str | Path,
    *,
    host: str | None = None,
    port: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ServeFile:
    """Read `path`; `host`, `port` and `overrides` (args of every application) win over the file.

    Raises:
        UserError: The file cannot be read, is no Serve config, or holds settings that cannot work.
    """
    config: Any = None
    # What cannot be read is explained with its line.
    with contextlib.suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if isinstance(config, dict) and "applications" not in config:
        raise UserError(f"{path} is not a Serve config: it has no list of 'applications'")
    explanation = explain_file(path, bundles=bundles_of, overrides=overrides)
    if refusals := explanation.refusals:
        first, more = refusals[0], len(refusals) - 1
        fix = f"; fix: {first.fix}" if first.fix else ""
        rest = f" (and {more} more: paceline explain {path})" if more else ""
        raise UserError(f"{path}:{first.line}: {first.message}{fix}{rest}")
    for app in config["applications"]:
        if app["import_path"] == BUILDER:
            app["args"] = {**(app.get("args") or {}), **(overrides or {})}
    for explained in explanation.apps:
        _check_memory(explained)
    http = config.setdefault("http_options", {}) or {}
    config["http_options"] = http
    http["host"] = host or http.get("host") or "127.0.0.1"
    http["port"] = port or http.get("port") or DEFAULT_PORT
    return ServeFile(config, str(http["host"]), int(http["port"]), explanation.apps)


def bundles_of(config: EngineConfig) -> Sequence[Mapping[str, float]]:
    """Bundles of one replica as far as the configuration alone says: GPUs where it names them."""
    return place_replica(config, use_gpus=config.runtime.device == "cuda").bundles


def _check_memory(app: AppExplanation) -> None:
    available = available_bytes()
    name = app.config.model.model
    model = Path(name).expanduser()
    if available is None or not model.is_dir() or app.config.runtime.device == "cuda":
        return
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) // 2**20
    needed = _BASE_MIB + app.serving["num_replicas"] * weights
    if needed * 2**20 > available:
        raise UserError(
            f"too little memory: serving {name} needs about {needed} MiB "
            f"({weights} MiB of weights), this machine has {available // 2**20} MiB free; "
            "close other programs or use a smaller model"
        )
