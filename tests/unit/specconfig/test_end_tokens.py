"""Which tokens end an answer, whoever names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specconfig.engine_args import EngineArgs
from specconfig.errors import ConfigError
from specconfig.model import ModelConfig
from tests.unit.specconfig.catalog import llama

TURNS = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def save(
    directory: Path,
    *,
    template: str | list[dict[str, str]] | None = None,
    eos: Any = None,
    added: dict[str, int] | None = None,
    generation: Any = None,
) -> Path:
    (directory / "config.json").write_text(json.dumps(llama()))  # eos_token_id 2
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    config = {"eos_token": eos, "chat_template": template}
    given = {key: value for key, value in config.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(given))
    tokens = [{"content": text, "id": index} for text, index in (added or {}).items()]
    (directory / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0, "</s>": 9}}, "added_tokens": tokens})
    )
    return directory


def resolved(path: Path, **args: Any) -> tuple[ModelConfig, str]:
    config = EngineArgs(model=str(path), **args).resolve()
    (why,) = (d.reason for d in config.decisions if d.field == "eos_token_ids")
    return config.model, why


def test_all_sources_are_united_and_named(tmp_path: Path) -> None:
    save(tmp_path, template=TURNS, eos="</s>", added={"<|im_end|>": 11}, generation=[7, 2])
    model, why = resolved(tmp_path)
    assert model.eos_token_ids == (2, 7, 9, 11)
    assert why == (
        "2: generation_config.json; 7: generation_config.json; 9: tokenizer_config.json: "
        "eos_token '</s>'; 11: the chat template ends turns with '<|im_end|>'"
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # A token of the vocabulary that no template writes; a template without the token.
        ({"added": {"<|im_end|>": 11}}, (2,)),
        ({"template": TURNS}, (2,)),
        ({"eos": {"content": "</s>"}}, (2, 9)),
        ({"eos": "<no such token>"}, (2,)),
        (
            {"template": [{"name": "tools", "template": TURNS}], "added": {"<|im_end|>": 11}},
            (2, 11),
        ),
        ({"template": "<|user|><|end|>", "added": {"<|end|>": 12}}, (2, 12)),
        # Harmony: each message of an answer ends so, not the answer.
        ({"template": "<|channel|>final<|end|>", "added": {"<|end|>": 12}}, (2,)),
        # Behind the embedding's rows: nothing can sample it.
        ({"template": TURNS, "added": {"<|im_end|>": 32000}}, (2,)),
    ],
)
def test_ends_of_a_tokenizer(tmp_path: Path, given: Any, expected: tuple[int, ...]) -> None:
    assert resolved(save(tmp_path, **given))[0].eos_token_ids == expected


def test_the_tokenizer_that_is_given_counts(tmp_path: Path) -> None:
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    for folder in (model, tokenizer):
        folder.mkdir()
    save(model, eos="</s>")
    save(tokenizer, added={"<|im_end|>": 11})
    (tokenizer / "chat_template.jinja").write_text(TURNS)
    assert resolved(model, tokenizer=str(tokenizer))[0].eos_token_ids == (2, 11)


def write_gguf(path: Path, **numbers: int) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(3)
    writer.add_head_count(4)
    writer.add_token_list([*(f"token {n}" for n in range(99)), "<|im_end|>"])
    writer.add_chat_template(TURNS)
    for key, value in numbers.items():
        writer.add_uint32(key.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_ends_of_a_gguf_file(tmp_path: Path) -> None:
    ids = {"eos": 2, "eot": 5, "eom": 6}
    numbers = {f"tokenizer__ggml__{name}_token_id": index for name, index in ids.items()}
    model, why = resolved(write_gguf(tmp_path / "m.gguf", **numbers))
    assert model.eos_token_ids == (2, 5, 6, 99)
    assert "5: tokenizer.ggml.eot_token_id; 6: tokenizer.ggml.eom_token_id; 99: the chat" in why


def test_a_part_of_a_split_gguf_file_is_refused(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    write_gguf(parts[0], split__count=3, split__no=0)
    with pytest.raises(ConfigError, match=r"part 1 of 3 .* missing parts \(m-00002-.*m-00003-"):
        EngineArgs(model=str(parts[0])).resolve()
    for part in parts[1:]:
        part.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"other weights .*; join them: llama-gguf-split --mer"):
        EngineArgs(model=str(parts[0])).resolve()
