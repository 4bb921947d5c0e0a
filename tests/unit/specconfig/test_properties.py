"""Properties: resolution is pure, idempotent, blind to key order, and survives JSON."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from specconfig.dynamic_k import parse_table, tokens_for_batch
from specconfig.engine import EngineConfig
from specconfig.engine_args import EngineArgs
from specconfig.errors import ConfigError
from specconfig.explaining.explain import explain_file
from specconfig.explaining.explanation import Explanation
from specconfig.explaining.text import render
from specconfig.resolving.speculation import resolve_speculation
from specconfig.speculative import SpeculativeConfig
from tests.unit.specconfig.catalog import TARGET, facts, target

MODEL = target()
DRAFTS = ["meta/tiny", "meta/tiny-pard", "org/eagle-head", "org/EAGLE3-head", "org/peagle3",
          "org/some-dflash", "org/dspark_x", "org/medusa-head", "sp/eagle3", "ngram"]  # fmt: skip


@st.composite
def tables(draw: st.DrawFn) -> list[list[int]]:
    """Valid dynamic K tables: ranges from 1, with gaps, in any order."""
    rows, start = [], 1
    for _ in range(draw(st.integers(1, 4))):
        last = start + draw(st.integers(0, 20))
        rows.append([start, last, draw(st.integers(0, 6))])
        start = last + 1 + draw(st.integers(0, 5))
    return draw(st.permutations(rows))


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Mostly sensible speculative_config dicts; some are invalid together, which is fine."""
    chosen: dict[str, Any] = {
        "model": draw(st.sampled_from(DRAFTS)),
        "num_speculative_tokens": draw(st.integers(1, 6)),
    }
    optional: dict[str, st.SearchStrategy[Any]] = {
        "num_speculative_tokens_per_batch_size": tables(),
        "rejection_sample_method": st.sampled_from(["standard", "block", "fly", "synthetic"]),
        "synthetic_acceptance_length": st.floats(1, 2),
        "draft_sample_method": st.sampled_from(["greedy", "probabilistic"]),
        "draft_tensor_parallel_size": st.just(1),
        "max_model_len": st.sampled_from([512, 2048]),
        "parallel_drafting": st.booleans(),
        "kv_cache_dtype": st.sampled_from(["fp8", "auto"]),
        "disable_lookahead_block_hashes": st.booleans(),
        "prompt_lookup_max": st.integers(1, 8),
        "quantization": st.just("awq"),
    }
    for name in draw(st.sets(st.sampled_from(sorted(optional)), max_size=4)):
        chosen[name] = draw(optional[name])
    return chosen


def attempt(config: dict[str, Any]) -> SpeculativeConfig | str:
    try:
        return resolve_speculation(config, target=MODEL, facts=facts)
    except ConfigError as error:
        return str(error)


@settings(max_examples=60, deadline=None)
@given(options())
def test_resolving_is_pure_and_idempotent(config: dict[str, Any]) -> None:
    before = copy.deepcopy(config)
    first = attempt(config)
    assert config == before
    assert attempt(config) == first
    if isinstance(first, SpeculativeConfig):
        again = resolve_speculation(first, target=MODEL, facts=facts)
        assert again == first


@settings(max_examples=60, deadline=None)
@given(options(), st.randoms(use_true_random=False))
def test_the_order_of_keys_is_irrelevant(config: dict[str, Any], random: Any) -> None:
    keys = list(config)
    random.shuffle(keys)
    hyphens = {
        (key.replace("_", "-") if random.random() < 0.5 else key): config[key] for key in keys
    }
    assert attempt(hyphens) == attempt(config)


@settings(max_examples=40, deadline=None)
@given(options(), st.sampled_from([512, 1024]), st.sampled_from([4, 32]))
def test_the_plan_survives_json_and_pickle(config: dict[str, Any], tokens: int, seqs: int) -> None:
    try:
        args = EngineArgs(model=TARGET, speculative_config=config, max_num_seqs=seqs,
                          max_num_batched_tokens=tokens)  # fmt: skip
        plan = args.resolve(facts)
    except ConfigError:
        return
    # No facts source is given: reading a plan back must not need one.
    again = EngineConfig.from_json(plan.to_json())
    assert again == plan == pickle.loads(pickle.dumps(plan))
    assert again.to_json() == plan.to_json()
    assert again.compute_hash() == plan.compute_hash()
    assert again.draft_law == plan.draft_law


@settings(max_examples=30, deadline=None)
@given(options())
def test_explanations_round_trip(config: dict[str, Any]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.yaml"
        path.write_text(yaml.safe_dump({"model": TARGET, "speculative_config": config}))
        explanation = explain_file(path, facts)
        assert Explanation.from_json(explanation.to_json()) == explanation
        assert render(explanation).strip()
        assert explanation.ok is bool(explanation.apps)
        for problem in explanation.problems:
            assert problem.message and problem.line >= 1


@settings(max_examples=100, deadline=None)
@given(tables(), st.integers(1, 6), st.integers(1, 100))
def test_K_of_a_batch_is_the_tier_that_began_last(
    rows: list[list[int]], k: int, batch: int
) -> None:
    begun = [tier for first, _, tier in sorted(rows) if first <= batch]
    assert tokens_for_batch(parse_table(rows), batch, k) == min(begun[-1], k)
