"""The verifier's and the ingress's processes load no torch, and tokenise as if they had."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, LlamaTokenizer

from tests.tiny import CHAT_TEMPLATE, write_tiny_config

ROOT = Path(__file__).parents[3]
SAMPLES = ("", "hello  there", " é世🦜\n", "he<s>ll</s> th", "<|bos|>a<|user|> b", "x" * 50)
TURNS = [{"role": "user", "content": "hell no"}, {"role": "assistant", "content": "the"}]

# What a replica's process and an ingress's process import.
IMPORTS = """
import json, sys
from typing import Any
import actors.startup.launch, actors.verifier.engine
import deploy.app, deploy.engine, deploy.openai.ingress, deploy.openai.service
from deploy.text import TextProcessor
from specconfig.app_args import AppArgs
"""


def said_by(tokenizer: Any) -> list[Any]:
    """Everything the product asks of a tokenizer, as JSON."""
    whole = [tokenizer.encode(text) for text in SAMPLES]
    bare = [tokenizer.encode(text, add_special_tokens=False) for text in SAMPLES]
    return [
        type(tokenizer).__name__,
        tokenizer.is_fast,
        whole,
        bare,
        [
            tokenizer.decode(ids, skip_special_tokens=skip)
            for ids in whole
            for skip in (True, False)
        ],
        [tokenizer.convert_ids_to_tokens(ids) for ids in whole],
        tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True),
        sorted((str(i), str(t), t.special) for i, t in tokenizer.added_tokens_decoder.items()),
        sorted(tokenizer.all_special_ids),
        len(tokenizer),
        json.loads(tokenizer.backend_tokenizer.to_str())["decoder"],
    ]


def write_llama_tokenizer(folder: Path) -> Path:
    """A SentencePiece-like vocabulary under a class that rebuilds its pipeline."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    pieces = ["\u2581", *map(chr, range(33, 127)), "he", "ll", "hell", "\u2581h", "th"]
    vocab |= {piece: len(vocab) + n for n, piece in enumerate(pieces)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("\u2581", "h"), ("t", "h")]
    made = LlamaTokenizer(vocab=vocab, merges=merges, chat_template=CHAT_TEMPLATE)
    made.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))
    return folder


def test_no_torch_is_loaded_and_tokenizers_are_those_of_transformers(tmp_path: Path) -> None:
    plain = write_tiny_config(tmp_path / "plain")
    rebuilt = write_llama_tokenizer(tmp_path / "rebuilt")
    lines = [
        IMPORTS,
        f"SAMPLES, TURNS = {SAMPLES!r}, {TURNS!r}",
        inspect.getsource(said_by),
        f"AppArgs(model={str(plain)!r}).resolve()",
        *(
            f"print(json.dumps(said_by(TextProcessor.load({str(folder)!r})._tokenizer)))"
            for folder in (plain, rebuilt)
        ),
        "print('torch' in sys.modules)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    *said, torch_is_loaded = done.stdout.splitlines()
    assert torch_is_loaded == "False"
    for folder, line in zip((plain, rebuilt), said, strict=True):
        expected = said_by(AutoTokenizer.from_pretrained(folder))
        assert json.loads(line) == json.loads(json.dumps(expected))
