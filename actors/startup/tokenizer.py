"""The tokenizer of a served model, without torch in this process.

`AutoTokenizer` imports torch with its first line, 460 MB and seconds that the verifier and the HTTP
surface have no use for. Which class it would choose matters, because some rebuild the text pipeline
instead of reading `tokenizer.json`. So it is asked in every case but the one where its answer is
known, and then in a process of its own that hands the finished tokenizer over.
"""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from actors import conversions
from actors.errors import LoadError

logger = logging.getLogger(__name__)

# Classes that take `tokenizer.json` as it is; where a checkpoint names one, AutoTokenizer does too.
_PLAIN: Final = ("TokenizersBackend", "PreTrainedTokenizerFast")
_KEPT: Final = "tokenizer"
_CHILD: Final = """
import json, pickle, sys
from transformers import AutoTokenizer
options = json.loads(sys.argv[1])
sys.stdout.buffer.write(pickle.dumps(AutoTokenizer.from_pretrained(**options)))
"""


def open_tokenizer(location: str, revision: str | None = None) -> Any:
    """A fast tokenizer from a directory, a GGUF file or a hub id. No code of it is run.

    Raises:
        LoadError: there is none, or it is of a kind that cannot be loaded.
    """
    from transformers import PreTrainedTokenizerFast

    path = Path(location).expanduser()
    if path.suffix == ".gguf":
        return _of_gguf(location, path)
    options: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path) if path.exists() else location,
        "revision": revision,
        "trust_remote_code": False,
    }
    try:
        if _is_plain(options["pretrained_model_name_or_path"], revision):
            return PreTrainedTokenizerFast.from_pretrained(**options)
        tokenizer = _ask_auto_tokenizer(options)
    except Exception as error:
        # A directory whose config AutoTokenizer does not know may still hold a plain tokenizer.
        if not (path / "tokenizer.json").is_file():
            raise LoadError(f"no tokenizer can be loaded from {location}: {error}") from error
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path))
    _require_fast(tokenizer, location)
    return tokenizer


def _require_fast(tokenizer: Any, location: str) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise LoadError(f"the tokenizer of {location} has no tokenizer.json (fast form)")


def _of_gguf(location: str, path: Path) -> Any:
    """The tokenizer of a GGUF file: as an earlier start has kept it, or converted and kept."""
    tokenizer = _open_kept(path)
    if tokenizer is not None:
        return tokenizer
    with conversions.one_at_a_time(path, _KEPT):
        tokenizer = _open_kept(path)  # what was waited for
        if tokenizer is not None:
            return tokenizer
        try:
            tokenizer = _ask_auto_tokenizer(
                {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
            )
        except Exception as error:
            raise LoadError(f"no tokenizer can be loaded from {location}: {error}") from error
        _require_fast(tokenizer, location)
        conversions.keep(path, _KEPT, path.stat().st_size, tokenizer.save_pretrained)
        again = _open_kept(path)
        if again is not None and _identity(again) != _identity(tokenizer):
            logger.warning("%s: its tokenizer cannot be kept, it reads back as another", location)
            conversions.drop(path, _KEPT)
    return tokenizer


def _open_kept(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    folder = conversions.kept(path, _KEPT)
    if folder is None:
        return None
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder))
    except Exception as error:
        logger.warning("%s: what %s holds is not used: %s", path, folder, error)
        conversions.drop(path, _KEPT)
        return None


def _identity(tokenizer: Any) -> tuple[Any, ...]:
    """All that may make two tokenizers differ in what they do."""
    backend = tokenizer.backend_tokenizer.to_str()
    cleans = getattr(tokenizer, "clean_up_tokenization_spaces", None)
    return backend, tokenizer.special_tokens_map, tokenizer.chat_template, cleans


def _is_plain(where: str, revision: str | None) -> bool:
    from transformers.utils import cached_file

    try:
        cached_file(where, "tokenizer.json", revision=revision)
        found = cached_file(where, "tokenizer_config.json", revision=revision)
    except OSError:
        return False
    config = json.loads(Path(found).read_text())
    return config.get("tokenizer_class") in _PLAIN and "auto_map" not in config


def _ask_auto_tokenizer(options: dict[str, Any]) -> Any:
    if "torch" in sys.modules:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(**options)
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(options)], capture_output=True, check=False
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise LoadError(lines[-1] if lines else f"exit status {done.returncode}")
    return pickle.loads(done.stdout)
