"""The demo model against transformers.generate: greedy, float32, token by token.

A position may differ only where the two best logits are closer than 1e-3: there rounding decides,
and both answers are right. Each such position is printed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.requests import GenerateRequest
from actors.startup.in_process import build_in_process
from actors.startup.preflight import load_tokenizer
from actors.verifier.engine import VerifierEngine
from specconfig import EngineArgs
from tests.tiny import CONSTANT_K

pytestmark = pytest.mark.model

NUM_PROMPTS = 12
NEW_TOKENS = 24
MARGIN = 1e-3
_OURS = Path(__file__).parents[1] / "data" / "prompts.jsonl"
# Present in the builders' checkout only; a user's clone runs on our own prompts.
_SPEC_BENCH = Path(__file__).parents[3] / "shared" / "data" / "spec_bench.jsonl"


def prompt_texts() -> list[str]:
    if _SPEC_BENCH.is_file():
        records = [json.loads(line) for line in _SPEC_BENCH.read_text().splitlines()]
        by_category: dict[str, list[str]] = {}
        for record in records:
            by_category.setdefault(record["category"], []).append(record["turns"][0])
        # Short ones of every category keep the suite's time bounded.
        picked = [t for texts in by_category.values() for t in sorted(texts, key=len)[1:3]]
        picked.sort(key=len)
        return picked[:NUM_PROMPTS]
    return [json.loads(line)["prompt"] for line in _OURS.read_text().splitlines()]


@pytest.fixture(scope="module")
def demo_dir() -> Path:
    from deploy.demo import ensure_demo_model

    return ensure_demo_model(lambda line: None)


@pytest.fixture(scope="module")
def prompts(demo_dir: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(EngineArgs(model=str(demo_dir)).resolve())
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in prompt_texts()
    ]


@pytest.fixture(scope="module")
def expected(demo_dir: Path, prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_dir, dtype=torch.float32).eval()
    out = []
    for ids in prompts:
        tensor = torch.tensor([ids])
        full = model.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        out.append(full[0, len(ids) :].tolist())
    yield out


@pytest.fixture(scope="module")
def short_draft(demo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's first six layers: a draft that is sometimes right."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_dir, dtype=torch.float32, num_hidden_layers=6)
    path = tmp_path_factory.mktemp("draft")
    model.save_pretrained(path)
    return path


NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "draft-model-batch-8-chunked": (
        {"model": "DRAFT", "num_speculative_tokens": 3},
        {"max_num_seqs": 8, "max_num_batched_tokens": 96},
    ),
    "ngram-batch-1-chunked": (
        {**NGRAM, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        {"max_num_seqs": 1, "max_num_batched_tokens": 64},
    ),
    "ngram-preempted": (NGRAM, {"max_num_seqs": 8, "kv_cache_memory_bytes": "POOL"}),
}


def build(demo_dir: Path, spec: dict[str, Any], **kw: Any) -> VerifierEngine:
    args = EngineArgs(
        model=str(demo_dir),
        dtype="float32",
        device="cpu",
        speculative_config={**CONSTANT_K, **spec},
        **kw,
    )
    return build_in_process(args.resolve(), warm_up=False)


def generate(engine: VerifierEngine, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts at once, greedily."""

    async def one(index: int) -> list[int]:
        request = GenerateRequest(
            request_id=f"r{index}",
            prompt_token_ids=prompts[index],
            max_tokens=NEW_TOKENS,
            temperature=0.0,
        )
        return [t async for out in engine.generate(request) for t in out.token_ids]

    async def everyone() -> list[list[int]]:
        with engine._wake:  # all are there before the first step, so that they compete for blocks
            tasks = [asyncio.ensure_future(one(i)) for i in range(len(prompts))]
            await asyncio.sleep(0)
        return list(await asyncio.gather(*tasks))

    return asyncio.run(everyone())


@pytest.fixture(scope="module")
def compiled(demo_dir: Path) -> Iterator[VerifierEngine]:
    """As users run it: compiled layers, and threads that share the work."""
    before = torch.get_num_threads()
    engine = build(
        demo_dir,
        {**NGRAM, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        compile_layers="on", num_threads=2, max_num_seqs=8, max_model_len=1024,
        enable_prefix_caching=False,
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.stop()
        torch.set_num_threads(before)


def test_compiled_layers_give_the_tokens_of_generate(
    compiled: VerifierEngine,
    demo_dir: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    got = generate(compiled, prompts)
    assert compiled.status().stats["num_accepted_tokens"] > 0
    for ids, ours, theirs in zip(prompts, got, expected, strict=True):
        _assert_same(demo_dir, ids, ours, theirs)


def test_drafts_change_no_bit_of_what_is_emitted(
    compiled: VerifierEngine, prompts: list[list[int]]
) -> None:
    """One row a step without drafts, several with them."""

    async def answer(ids: list[int], name: str, **kw: Any) -> list[tuple[int, float]]:
        request = GenerateRequest(name, ids, max_tokens=40, ignore_eos=True, num_logprobs=0, **kw)
        return [
            (token.token_id, token.logprob)
            async for out in compiled.generate(request)
            for token in out.logprobs or ()
        ]

    before = compiled.status().stats["num_accepted_tokens"]
    laws = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3})
    for ids, law in zip(prompts, laws, strict=False):
        plain = asyncio.run(answer(ids, "plain", speculation_enabled=False, **law))
        assert asyncio.run(answer(ids, "drafts", **law)) == plain
    assert compiled.status().stats["num_accepted_tokens"] > before


@pytest.mark.parametrize("case", CASES)
def test_greedy_equals_generate(
    case: str,
    demo_dir: Path,
    short_draft: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    spec, kw = CASES[case]
    if kw["max_num_seqs"] == 1:  # slow; what it shows does not take all prompts
        prompts, expected = prompts[:4] + prompts[-1:], expected[:4] + expected[-1:]
    if spec.get("model") == "DRAFT":
        spec = {**spec, "model": str(short_draft)}
    longest = max(map(len, prompts)) + NEW_TOKENS + 1
    kw = {"max_model_len": max(512, longest), "compile_layers": "off", **kw}
    if kw.get("kv_cache_memory_bytes") == "POOL":
        # One request of full length, and a block more: eight requests must preempt each other.
        kw["kv_cache_memory_bytes"] = (-(-kw["max_model_len"] // 16) + 2) * 16 * 46_080
    engine = build(demo_dir, spec, **kw)
    try:
        got = generate(engine, prompts)
        stats = engine.status().stats
    finally:
        engine.stop()
    assert stats["num_accepted_tokens"] > 0
    if "preempted" in case:
        assert stats["num_preemptions"] > 0
    for ids, ours, theirs in zip(prompts, got, expected, strict=True):
        _assert_same(demo_dir, ids, ours, theirs)


def test_a_gguf_file_has_the_same_facts_and_tokenizer(demo_dir: Path) -> None:
    from deploy.demo import find_gguf

    gguf = find_gguf()
    ours, theirs = (EngineArgs(model=str(p), device="cpu").resolve() for p in (gguf, demo_dir))
    for fact in ("vocab_size", "num_hidden_layers", "num_key_value_heads", "head_dim"):
        assert getattr(ours.model, fact) == getattr(theirs.model, fact), fact
    text = "Speculation: 3 tokens, \u00e9 and \u2603."
    from_gguf = load_tokenizer(ours)
    ids = from_gguf(text)["input_ids"]
    assert ids == load_tokenizer(theirs)(text)["input_ids"]
    assert from_gguf.decode(ids) == text


def _assert_same(demo_dir: Path, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
    if ours == theirs:
        return
    where = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + theirs[:where]])).logits[0, -1]
    best = logits.topk(2).values
    margin = float(best[0] - best[1])
    print(
        f"position {where}: {ours[where : where + 1]} != {theirs[where : where + 1]}, {margin=:.2e}"
    )
    assert margin < MARGIN, f"tokens differ at {where} where the margin is {margin:.3g}"
