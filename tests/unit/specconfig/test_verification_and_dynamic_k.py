"""Acceptance methods and K by batch size."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from specconfig.dynamic_k import parse_table, tokens_for_batch
from specconfig.engine_args import EngineArgs
from specconfig.errors import ConfigError
from specconfig.resolving.synthetic import rates_from_length
from tests.unit.specconfig.catalog import TARGET, engine, facts, spec, warnings_of

NGRAM = {"method": "ngram", "K": 4}
SYNTHETIC = {**NGRAM, "rejection_sample_method": "synthetic"}
FLY = {**NGRAM, "rejection_sample_method": "fly"}
ONLY_SYNTHETIC = "only valid with rejection_sample_method='synthetic'"
TABLE = [[1, 8, 4], [9, 32, 3], [33, 128, 2]]


@pytest.mark.parametrize(
    ("length", "rates"),
    [
        pytest.param(1, [0, 0, 0, 0], id="1"),
        pytest.param(2.6, [1, 0.6, 0, 0], id="2.6"),
        pytest.param(3, [1, 1, 0, 0], id="3"),
        pytest.param(4.5, [1, 1, 1, 0.5], id="4.5"),
        pytest.param(5, [1, 1, 1, 1], id="5"),
    ],
)
def test_synthetic_length_becomes_rates(length: float, rates: list[float]) -> None:
    resolved = spec({**SYNTHETIC, "synthetic_acceptance_length": length})
    assert resolved.synthetic_acceptance_rates == pytest.approx(rates)
    assert resolved.synthetic_acceptance_length is None and not resolved.is_lossless


REFUSED = [
    ({**SYNTHETIC, "synthetic_acceptance_length": 0.9}, r"\[1, 5\]"),
    ({**SYNTHETIC, "synthetic_acceptance_length": 5.1}, r"\[1, 5\]"),
    ({**SYNTHETIC, "synthetic_acceptance_length": math.nan}, r"\[1, 5\]"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.6, 0.5, 0.5]},
     "non-increasing"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.5, 0.5]}, "length 4"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [1.1, 0.5, 0.5, 0.5]}, r"\[0, 1\]"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [math.nan, 0.5, 0.5, 0.5]},
     r"\[0, 1\]"),
    ({**SYNTHETIC, "synthetic_acceptance_length": 2,
                 "synthetic_acceptance_rates": [1, 0, 0, 0]}, "exactly one"),
    (SYNTHETIC, "exactly one"),
    *(({**NGRAM, "rejection_sample_method": m, "synthetic_acceptance_length": 2},
       ONLY_SYNTHETIC) for m in ("standard", "block", "fly")),
    *(({**NGRAM, "rejection_sample_method": m,
                         "synthetic_acceptance_rates": [1, 0, 0, 0]},
       ONLY_SYNTHETIC) for m in ("standard", "block", "fly")),
    ({**NGRAM, "rejection_sample_method": "typical"},
     "'block', 'fly', 'standard', 'synthetic'"),
    ({**FLY, "K": 1}, "at least 2"),
    ({**FLY, "fly_window_size": 4}, "less than num_speculative_tokens=4"),
    ({**FLY, "fly_window_size": 0}, "greater than or equal to 1"),
    ({**NGRAM, "fly_window_size": 99}, "only with .*fly"),
    ({**FLY, "fly_entropy_threshold": -1}, "greater than or equal to 0"),
    ({**FLY, "fly_entropy_top_k": 0}, "greater than or equal to 1"),
    ({"model": "org/EAGLE3-head", "K": 4, "enable_adaptive_verification": True,
                    "use_local_argmax_reduction": True}, "enable_adaptive_verification"),
    ({**NGRAM, "enable_adaptive_verification": True,
                   "use_local_argmax_reduction": True}, "enable_adaptive_verification"),
    ({"model": "org/EAGLE3-head", "K": 4, "draft_sample_method": "probabilistic",
             "use_local_argmax_reduction": True}, "full draft logits"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "gist"), REFUSED)
def test_refused(given: dict[str, Any], gist: str) -> None:
    with pytest.raises(ConfigError) as raised:
        spec(given)
    assert re.search(gist, str(raised.value), re.DOTALL), str(raised.value)


def test_synthetic_rates_are_kept() -> None:
    resolved = spec({**SYNTHETIC, "synthetic_acceptance_rates": [0.9, 0.8, 0.5, 0.5]})
    assert resolved.synthetic_acceptance_rates == (0.9, 0.8, 0.5, 0.5)


@pytest.mark.parametrize(
    ("k", "window"),
    [pytest.param(4, 3, id="4"), pytest.param(10, 6, id="10"), pytest.param(2, 1, id="2")],
)
def test_fly_window_follows_K(k: int, window: int) -> None:
    resolved = spec({**FLY, "K": k})
    assert resolved.fly_window_size == window and not resolved.is_lossless
    assert "lossy" in warnings_of({**FLY, "K": k})


def test_fly_window_can_be_given() -> None:
    assert spec({**FLY, "fly_window_size": 3}).fly_window_size == 3


def test_dspark_scores_its_drafts_without_logits() -> None:
    given = {"model": "org/dspark_x", "enable_adaptive_verification": True,
             "use_local_argmax_reduction": True}  # fmt: skip
    assert spec(given).enable_adaptive_verification is True


def test_pipeline_stages_are_refused_here_too() -> None:
    # Graph modes and LoRA do not exist here and pipeline stages are refused for every method, so
    # one of the three errors remains.
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        EngineArgs(model=TARGET, pipeline_parallel_size=2)


@pytest.mark.parametrize("k", [pytest.param(k, id=f"K{k}") for k in range(1, 9)])
def test_synthetic_schedules_have_the_length_asked_for(k: int) -> None:
    for tenth in range(10, 10 * (k + 1) + 1):
        rates = rates_from_length(tenth / 10, k)
        assert len(rates) == k
        assert sum(rates) == pytest.approx(tenth / 10 - 1, abs=1e-9)
        assert list(rates) == sorted(rates, reverse=True)


def test_a_table_of_K_by_batch_is_kept() -> None:
    resolved = spec({**NGRAM, "num_speculative_tokens_per_batch_size": TABLE})
    assert resolved.num_speculative_tokens_per_batch_size == ((1, 8, 4), (9, 32, 3), (33, 128, 2))


BAD_TABLES: list[tuple[str, Any, str]] = [
    (None, "must be a list"),
    ("x", "must be a list"),
    ([], "must not be empty"),
    ([(1, 2)], "three integers"),
    ([(0, 2, 1)], "must be positive"),
    ([(3, 2, 1)], "3-2 is reversed"),
    ([(1, 2, -1)], "K must be 0 or more"),
    ([(2, 4, 1)], "must start at 1"),
    ([(1, 4, 2), (4, 8, 1)], "non-overlapping"),
]


@pytest.mark.parametrize(("table", "gist"), BAD_TABLES)
def test_a_bad_table_says_what_is_wrong(table: Any, gist: str) -> None:
    with pytest.raises(ConfigError, match=gist):
        parse_table(table)


def test_tables_are_sorted() -> None:
    assert parse_table([(9, 32, 3), (1, 8, 4)]) == ((1, 8, 4), (9, 32, 3))


@pytest.mark.parametrize(
    ("table", "batch", "k", "lookup"),
    [
        pytest.param([(1, 2, 3), (5, 6, 9)], 8, 4, [0, 3, 3, 3, 3, 4, 4, 4, 4]),
        pytest.param([(1, 4, 3)], 2, 5, [0, 3, 3]),
        pytest.param([(1, 8, 0)], 3, 5, [0, 0, 0, 0], id="zero-K"),
    ],
)
def test_lookup(table: Any, batch: int, k: int, lookup: list[int]) -> None:
    assert [tokens_for_batch(parse_table(table), n, k) for n in range(1, batch + 1)] == lookup[1:]


@pytest.mark.parametrize(
    "table",
    [pytest.param([], id="empty"), pytest.param([[2, 8, 1]], id="start-2"),
     pytest.param([[1, 2]], id="pair"), pytest.param("1-8", id="string")],
)  # fmt: skip
def test_checked_at_construction(table: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        spec({**NGRAM, "num_speculative_tokens_per_batch_size": table})
    assert raised.value.field.endswith("num_speculative_tokens_per_batch_size")


def dynamic(given: dict[str, Any], **args: Any) -> Any:
    return engine({**given, "num_speculative_tokens_per_batch_size": TABLE}, **args)


def test_data_parallelism_clears_the_table() -> None:
    config = dynamic(NGRAM, data_parallel_size=2)
    assert config.num_speculative_tokens_for_batch(100) == 4
    assert len([w for w in config.warnings if "per_batch_size is not used" in w]) == 1
    [decision] = [d for d in config.decisions if d.field.endswith("per_batch_size")]
    assert (decision.value, decision.source) == (None, "fallback")
    assert "data_parallel_size=2" in decision.reason


def test_an_agreeing_policy_keeps_the_table() -> None:
    config = dynamic(NGRAM, data_parallel_size=2, dynamic_k_dp_policy="agree")
    assert config.num_speculative_tokens_for_batch(100) == 2


# One runner with central truncation, and layers compiled per row count: no graph mode is demoted
# and no method loses its table, except extraction, which proposes nothing.
KEPT = [
    (NGRAM, "auto"),
    (NGRAM, "on"),
    (NGRAM, "off"),
    ({"model": "org/eagle-head", "K": 4}, "on"),
    ({"model": "org/EAGLE3-head", "K": 4}, "on"),
    ({"model": "meta/tiny", "K": 4}, "on"),
    ({"model": "org/some-dflash", "K": 4}, "on"),
    ({"method": "ngram_gpu", "K": 4}, "on"),
    ({"method": "suffix", "K": 4}, "on"),
    ({"model": "org/dspark_x", "K": 4}, "on"),
    ({"method": "medusa", "model": "org/medusa-head", "K": 4}, "on"),
]


@pytest.mark.parametrize(("given", "compiled"), KEPT)
def test_table_is_kept(given: dict[str, Any], compiled: Any) -> None:
    config = dynamic(given, compile_layers=compiled)
    assert [config.num_speculative_tokens_for_batch(n) for n in (1, 9, 33)] == [4, 3, 2]
    assert config.runtime.compile_layers == compiled


def test_mtp_keeps_the_table() -> None:
    config = dynamic({"method": "mtp", "K": 4}, model="ds/V3")
    assert config.num_speculative_tokens_for_batch(9) == 3


def test_extraction_has_no_use_for_the_table() -> None:
    ids = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}
    config = dynamic({"method": "extract_hidden_states", "K": 1, "draft_model_config": ids})
    assert config.speculative.num_speculative_tokens_per_batch_size is None


def test_ranges_as_a_mapping() -> None:
    table = parse_table({"1-16": 3, "64-128": 2, "256-4096": 0})
    got = [tokens_for_batch(table, size, 9) for size in (16, 17, 64, 200, 256, 5000)]
    assert got == [3, 3, 2, 2, 0, 0]


def test_fly_says_where_it_is_inert() -> None:
    table = [[1, 8, 4], [9, 32, 2]]
    assert "inert for batches 9-32" in warnings_of(
        {**FLY, "num_speculative_tokens_per_batch_size": table}
    )


def test_resolution_takes_no_batch_of_zero() -> None:
    assert engine(None).num_speculative_tokens_for_batch(3) == 0
    args = EngineArgs(model=TARGET, spec_method="ngram", spec_tokens=2, max_num_batched_tokens=256)
    assert args.resolve(facts).num_speculative_tokens_for_batch(0) == 2


SCHEDULE = "num_speculative_tokens_schedule"
TABLED = {**NGRAM, "num_speculative_tokens_per_batch_size": TABLE}
LAYERS = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}
EXTRACTION = {"method": "extract_hidden_states", "K": 1, "draft_model_config": LAYERS}


@pytest.mark.parametrize(
    ("given", "args", "value", "source"),
    [
        (NGRAM, {}, "goodput", "default"),
        ({"model": "org/EAGLE3-head", "K": 4}, {}, "goodput", "default"),
        ({**NGRAM, SCHEDULE: "constant"}, {}, "constant", "given"),
        (TABLED, {}, "constant", "inferred"),
        ({**TABLED, SCHEDULE: "goodput"}, {}, "goodput", "given"),
        (FLY, {}, "constant", "inferred"),
        ({**FLY, SCHEDULE: "goodput"}, {}, "goodput", "given"),
        (NGRAM, {"data_parallel_size": 2}, "constant", "fallback"),
        (EXTRACTION, {}, "constant", "fallback"),
    ],
)
def test_k_follows_goodput_unless_somebody_else_decides(
    given: dict[str, Any], args: dict[str, Any], value: str, source: str
) -> None:
    config = engine(given, **args)
    assert config.follows_goodput == (value == "goodput")
    [decision] = [d for d in config.decisions if d.field.endswith(SCHEDULE)]
    assert (decision.value, decision.source) == (value, source) and decision.reason
    assert not [w for w in config.warnings if SCHEDULE in w]


def test_a_schedule_that_cannot_be_had_is_a_warning_and_an_unknown_one_an_error() -> None:
    config = engine({**NGRAM, SCHEDULE: "goodput"}, data_parallel_size=2)
    assert not config.follows_goodput
    assert [w for w in config.warnings if f"{SCHEDULE}='goodput' is not used" in w]
    with pytest.raises(ConfigError, match="goodput") as raised:
        engine({**NGRAM, SCHEDULE: "adaptive"})
    assert raised.value.field == f"speculative_config.{SCHEDULE}"
