"""Every field of a request does what it says, with and without drafts, and harms nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.startup.in_process import build_in_process
from specconfig import EngineArgs
from tests.sampling_fields import check_every_field
from tests.tiny import CONSTANT_K, byte_tokenizer, write_tiny_model

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(root / "target"), write_tiny_model(root / "draft", seed=7, num_layers=1)


def answers(target: Path, spec: dict[str, Any] | None, k: int, plain: Any = None) -> Any:
    config = EngineArgs(
        model=str(target), speculative_config=spec and {**CONSTANT_K, **spec}, max_model_len=128,
        max_num_seqs=4, dtype="float32", device="cpu", compile_layers="off",
    ).resolve()  # fmt: skip
    engine = build_in_process(config, tokenizer=byte_tokenizer(), warm_up=False)
    try:
        return check_every_field(engine, k, plain)
    finally:
        engine.stop()


def test_every_field_with_and_without_drafts(models: tuple[Path, Path]) -> None:
    target, draft = models
    plain = answers(target, None, 0)
    answers(target, {**NGRAM, "num_speculative_tokens": 4}, 4, plain)
    answers(target, {"model": str(draft), "num_speculative_tokens": 3}, 3, plain)
