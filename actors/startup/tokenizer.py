"""The tokenizer of a served model, without torch in this process.

`AutoTokenizer` imports torch with its first line, 460 MB and seconds that the verifier and the HTTP
surface have no use for. Which class it would choose matters, because some rebuild the text pipeline
instead of reading `tokenizer.json`. So it is asked in every case but the one where its answer is
known, and then in a process of its own that hands the finished tokenizer over.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from actors.errors import LoadError

# Classes that take `tokenizer.json` as it is; where a checkpoint names one, AutoTokenizer does too.
_PLAIN: Final = ("TokenizersBackend", "PreTrainedTokenizerFast")
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
    options: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path) if path.exists() else location,
        "revision": revision,
        "trust_remote_code": False,
    }
    try:
        if path.suffix == ".gguf":
            options |= {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        elif _is_plain(options["pretrained_model_name_or_path"], revision):
            return PreTrainedTokenizerFast.from_pretrained(**options)
        tokenizer = _ask_auto_tokenizer(options)
    except Exception as error:
        # A directory whose config AutoTokenizer does not know may still hold a plain tokenizer.
        if not (path / "tokenizer.json").is_file():
            raise LoadError(f"no tokenizer can be loaded from {location}: {error}") from error
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path))
    if not getattr(tokenizer, "is_fast", False):
        raise LoadError(f"the tokenizer of {location} has no tokenizer.json (fast form)")
    return tokenizer


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
