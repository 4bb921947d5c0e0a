"""A drafter and an acceptance rule from outside the package, in an engine of one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.requests import GenerateRequest, RunOutput
from actors.startup.in_process import build_in_process
from specconfig import acceptance, registry
from specconfig.engine_args import EngineArgs
from tests.tiny import CONSTANT_K, write_tiny_model

PLUGIN = Path(__file__).parents[1] / "plugin"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if it were installed: on the path, found by its entry points."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(PLUGIN)])
    registry._load_entry_points.cache_clear()
    acceptance._load_entry_points.cache_clear()
    yield
    for table in (registry._custom, acceptance._custom):
        for name in [name for name in table if name.startswith("toy_")]:
            del table[name]
    sys.modules.pop("toy_plugin", None)


def outputs(model: Path, speculation: dict[str, Any] | None) -> tuple[list[list[RunOutput]], Any]:
    args = EngineArgs(
        model=str(model), device="cpu", dtype="float32", compile_layers="off", max_model_len=256,
        max_num_seqs=4, max_num_batched_tokens=24, speculative_config=speculation,
    )  # fmt: skip
    engine = build_in_process(args.resolve())
    import asyncio

    async def one(request: GenerateRequest) -> list[RunOutput]:
        return [run async for run in engine.generate(request)]

    async def run() -> list[list[RunOutput]]:
        requests = [
            GenerateRequest("greedy", list(b"abcabcabcabcabcabcabcabcabcabc"), 60, temperature=0.0,
                            ignore_eos=True),
            GenerateRequest("seeded", list(b"xyzzy"), 60, temperature=0.8, seed=3, ignore_eos=True),
            GenerateRequest("greedy again", list(b"abcabcabcabcabcabcabcabcabcabc"), 60,
                            temperature=0.0, ignore_eos=True),
        ]  # fmt: skip
        return await asyncio.gather(*(one(request) for request in requests))

    try:
        return asyncio.run(run()), engine.stats
    finally:
        engine.stop()


def tokens(runs: list[list[RunOutput]]) -> list[list[int]]:
    return [[token for out in request for token in out.token_ids] for request in runs]


def test_methods_from_outside_the_package_change_speed_never_output(
    plugin: None, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    plain, _ = outputs(model, None)
    given = {"method": "toy_states", "num_speculative_tokens": 3, **CONSTANT_K}
    exact, stats = outputs(model, given)
    half, slower = outputs(model, {**given, "rejection_sample_method": "toy_half"})
    assert tokens(plain) == tokens(exact) == tokens(half)
    for found in (stats, slower):
        assert found.num_draft_losses == 0, "its checks of states and columns held"
        assert 0 < found.num_accepted_tokens < found.num_draft_tokens
    assert slower.acceptance_length < stats.acceptance_length
