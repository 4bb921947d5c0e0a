"""The same bits with and without speculation, on real (tiny, random) models through the engine.

Every run's tokens and logprobs must equal, bit for bit, those of the plain engine (K = 0) alone in
its batch; plain greedy tokens must equal transformers' generate.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.errors import PromptTooLong
from actors.requests import GenerateRequest, RunOutput
from actors.startup.in_process import build_in_process
from actors.verifier.engine import VerifierEngine
from actors.verifier.goodput import Goodput
from specconfig import EngineArgs
from tests.tiny import CONSTANT_K, byte_tokenizer, write_tiny_model

MAX_LEN = 160


@dataclass(frozen=True)
class Result:
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: str
    accepted: int
    drafted: int


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(root / "target"), write_tiny_model(root / "draft", seed=7, num_layers=1)


def prompts() -> list[list[int]]:
    """Lengths 1 to 60; one is a single token, one repeats a token 48 times, several repeat runs."""
    rng = np.random.default_rng(11)
    out = [[65], [66] * 48, [70, 71, 72, 73] * 12]
    out += [rng.integers(0, 256, int(n)).tolist() for n in rng.integers(2, 60, 9)]
    return out


def engine(models: tuple[Path, Path], spec: dict[str, Any] | None, **kw: Any) -> VerifierEngine:
    target, draft = models
    names = {"target": str(target), "draft": str(draft)}
    if spec is not None:
        spec = {**CONSTANT_K, **spec}
    if spec is not None and spec.get("model") in names:
        spec["model"] = names[spec["model"]]
    args = {"max_model_len": MAX_LEN, "max_num_seqs": 8, "dtype": "float32", "device": "cpu", **kw}
    config = EngineArgs(model=str(target), speculative_config=spec, **args).resolve()
    return build_in_process(config, tokenizer=byte_tokenizer(), warm_up=False)


def run(eng: VerifierEngine, requests: list[GenerateRequest]) -> list[Result]:
    """All requests at once; results in order."""

    async def one(request: GenerateRequest) -> Result:
        outs: list[RunOutput] = [out async for out in eng.generate(request)]
        last = outs[-1]
        assert last.error is None and last.finish_reason is not None
        ids = tuple(t for o in outs for t in o.token_ids)
        entries = [e for o in outs for e in (o.logprobs or ())]
        assert [e.token_id for e in entries] == list(ids)
        return Result(
            ids,
            tuple(e.logprob for e in entries),
            "".join(o.text for o in outs),
            last.finish_reason.value,
            last.speculation.num_accepted_tokens,
            last.speculation.num_draft_tokens,
        )

    async def everyone() -> list[Result]:
        return list(await asyncio.gather(*(one(r) for r in requests)))

    return asyncio.run(everyone())


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.01},
}


def request(mode: str, index: int, **kw: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{mode}-{index}",
        prompt_token_ids=prompts()[index],
        max_tokens=40,
        ignore_eos=index % 2 == 0,
        num_logprobs=2,
        seed=100 + index,
        **SAMPLING[mode],
        **kw,
    )


def modes(turn: int) -> list[str]:
    """Half of the prompts greedy, half sampled, so that each batch has both; turns alternate."""
    return ["seeded" if (index // 2 + turn) % 2 else "greedy" for index in range(len(prompts()))]


def same_bits(got: list[Result], plain: dict[str, list[Result]], turn: int) -> None:
    for index, (mode, ours) in enumerate(zip(modes(turn), got, strict=True)):
        theirs = plain[mode][index]
        assert (ours.ids, ours.logprobs) == (theirs.ids, theirs.logprobs), (mode, index)
        assert (ours.text, ours.finish) == (theirs.text, theirs.finish), (mode, index)


def mixed(turn: int, **kw: Any) -> list[GenerateRequest]:
    return [request(mode, index, **kw) for index, mode in enumerate(modes(turn))]


@pytest.fixture(scope="module")
def plain(models: tuple[Path, Path]) -> Iterator[dict[str, list[Result]]]:
    """The oracle: K = 0, one request at a time, whole prompts."""
    eng = engine(models, None, enable_prefix_caching=False)
    try:
        numbers = range(len(prompts()))
        yield {mode: [run(eng, [request(mode, n)])[0] for n in numbers] for mode in SAMPLING}
    finally:
        eng.stop()


def test_plain_greedy_equals_generate(
    models: tuple[Path, Path], plain: dict[str, list[Result]]
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()
    for index, got in enumerate(plain["greedy"]):
        asked = request("greedy", index)
        ids = torch.tensor([asked.prompt_token_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None if asked.ignore_eos else model.config.eos_token_id,
            pad_token_id=0,
        )
        assert got.ids == tuple(out[0, ids.shape[1] :].tolist())
    # Log-probabilities against the plain forward.
    asked, got = request("greedy", 3), plain["greedy"][3]
    with torch.inference_mode():
        whole = model(torch.tensor([[*asked.prompt_token_ids, *got.ids]])).logits[0]
    table = whole[len(asked.prompt_token_ids) - 1 : -1].log_softmax(-1)
    expected = [float(table[i, t]) for i, t in enumerate(got.ids)]
    assert got.logprobs == pytest.approx(expected, abs=1e-4)


NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
GOODPUT = {"num_speculative_tokens_schedule": "goodput"}
COPY = {"model": "target"}
OTHER = {"model": "draft"}


@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("spec", [NGRAM, COPY, OTHER], ids=["ngram", "copy", "other"])
def test_same_bits_for_every_k_and_drafter(
    models: tuple[Path, Path], plain: dict[str, list[Result]], spec: dict[str, Any], k: int
) -> None:
    eng = engine(models, {**spec, "num_speculative_tokens": k})
    try:
        got = run(eng, mixed(turn=k // 4))
        same_bits(got, plain, turn=k // 4)
        drafted = sum(r.drafted for r in got)
        assert drafted > 0, "nothing was drafted: this run tested nothing"
        if spec is COPY:
            # A draft equal to the target must be right every time, sampled or not; what a stop
            # trims off the last run does not count as accepted.
            trimmed = sum(k for r in got if r.finish == "stop")
            assert sum(r.accepted for r in got) >= drafted - trimmed
        status = eng.status()
        assert status.num_free_blocks + status.num_cached_blocks == status.num_blocks
        assert status.num_running == status.num_waiting == 0
    finally:
        eng.stop()


@pytest.mark.parametrize("spec", [NGRAM, OTHER], ids=["ngram", "other"])
def test_k_that_follows_goodput_changes_no_bit(
    models: tuple[Path, Path],
    plain: dict[str, list[Result]],
    spec: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With made-up costs of rows, so that what is chosen does not depend on the machine."""
    observe = Goodput.observe_step

    def dear(self: Goodput, num_rows: int, seconds: float, longest: int, drafting_s: float) -> None:
        observe(self, num_rows, 1 + 0.1 * num_rows, longest, 0.0)

    eng = engine(models, {**spec, "num_speculative_tokens": 4, **GOODPUT})
    try:
        # Nothing is asked of it: it measures real steps, without and with drafts of all seats.
        deadline = time.monotonic() + 20
        while not {"1", "5"} <= set(eng.stats.step_cost_s):
            assert time.monotonic() < deadline, eng.stats.step_cost_s
            time.sleep(0.01)
        assert max(map(int, eng.stats.step_cost_s)) >= 36 and eng.stats.num_steps == 0
        monkeypatch.setattr(Goodput, "observe_step", dear)
        turn = int(spec is NGRAM)
        same_bits(run(eng, mixed(turn)), plain, turn)
        per_k = eng.stats.num_request_steps_per_k
        assert sum(n > 0 for n in per_k) >= 3, f"K did not vary: {per_k}"
        status = eng.status()
        assert status.num_free_blocks + status.num_cached_blocks == status.num_blocks
    finally:
        eng.stop()


BATCHINGS: dict[str, dict[str, Any]] = {
    "chunks-of-9": {"max_num_batched_tokens": 9, "max_num_seqs": 3},
    "chunks-of-33": {"max_num_batched_tokens": 33, "max_num_seqs": 4},
    "no-cache-2": {"enable_prefix_caching": False, "max_num_seqs": 2},
    "preempted": {"max_num_seqs": 6},
    "one-by-one": {"max_num_seqs": 1},
}


@pytest.mark.parametrize("spec", [None, NGRAM, COPY], ids=["plain", "ngram", "copy"])
@pytest.mark.parametrize("batching", BATCHINGS)
def test_same_bits_for_every_batching(
    models: tuple[Path, Path],
    plain: dict[str, list[Result]],
    spec: dict[str, Any] | None,
    batching: str,
) -> None:
    kw = dict(BATCHINGS[batching])
    if batching == "preempted":
        kw["kv_cache_memory_bytes"] = 15 * 16 * (1024 if spec is COPY else 512)
    full = None if spec is None else {**spec, "num_speculative_tokens": 3}
    turn = int(spec is NGRAM)
    eng = engine(models, full, **kw)
    try:
        same_bits(run(eng, mixed(turn)), plain, turn)
        if batching == "preempted":
            assert eng.status().stats["num_preemptions"] > 0, "nothing was preempted"
    finally:
        eng.stop()


def test_per_request_switch_and_cache_hits_change_no_bit(
    models: tuple[Path, Path], plain: dict[str, list[Result]]
) -> None:
    eng = engine(models, {**COPY, "num_speculative_tokens": 4})
    try:
        off = run(eng, mixed(0, speculation_enabled=False))
        assert eng.stats.draft_time_s.count == 0, "the draft ran for requests that never draft"
        # Their prompts are found; the draft has no KV of them and catches up.
        two = run(eng, [_renamed(r, "b") for r in mixed(0, num_speculative_tokens=2)])
        same_bits(off, plain, 0)
        same_bits(two, plain, 0)
        drafted = sum(r.drafted for r in two)
        assert sum(r.drafted for r in off) == 0 < drafted
        trimmed = sum(2 for r in two if r.finish == "stop")
        assert sum(r.accepted for r in two) >= drafted - trimmed
    finally:
        eng.stop()


def _renamed(request: GenerateRequest, suffix: str) -> GenerateRequest:
    from dataclasses import replace

    return replace(request, request_id=request.request_id + suffix)


def test_context_end_every_length(models: tuple[Path, Path]) -> None:
    """Prompts up to the last position, every K: finish at the limit, the next one fine."""
    for k in (1, 4, 8):
        for spec in (NGRAM, OTHER):
            eng = engine(
                models, {**spec, "num_speculative_tokens": k}, max_model_len=64, max_num_seqs=4
            )
            try:
                too_long = GenerateRequest("long", prompt_token_ids=[7, 8, 9, 5] * 16)
                with pytest.raises(PromptTooLong, match=r"64 tokens.*64 tokens"):
                    run(eng, [too_long])
                fitting = [
                    GenerateRequest(
                        request_id=f"q{n}", prompt_token_ids=([7, 8, 9, 5] * 16)[:n],
                        max_tokens=100 if n % 2 else None, temperature=0.0, ignore_eos=True,
                        num_logprobs=0,
                    )
                    for n in range(50, 64)
                ]  # fmt: skip
                for request, got in zip(fitting, run(eng, fitting), strict=True):
                    assert len(request.prompt_token_ids) + len(got.ids) == 64
                    assert got.finish == "length"
            finally:
                eng.stop()


def test_abort_frees_blocks_within_a_step(models: tuple[Path, Path]) -> None:
    eng = engine(models, {**COPY, "num_speculative_tokens": 2})
    done = threading.Event()
    try:
        seen: list[RunOutput] = []

        def sink(out: RunOutput) -> None:
            seen.append(out)
            if len(seen) == 2:
                eng.abort("gone")
            if out.finish_reason is not None:
                done.set()

        eng.add_request(GenerateRequest("gone", [1, 2, 3], temperature=0.0, ignore_eos=True), sink)
        assert done.wait(20)
        assert seen[-1].finish_reason is not None and seen[-1].finish_reason.value == "abort"
        assert len(seen) <= 4
        status = eng.status()
        assert status.num_referenced_blocks == 0
    finally:
        eng.stop()
