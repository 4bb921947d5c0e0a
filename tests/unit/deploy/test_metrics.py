from __future__ import annotations

import math
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from actors.stats import EngineStats
from deploy.engine_client import ReplicaReport
from deploy.metrics import METRICS, as_markdown, render

DOCS = Path(__file__).parents[3] / "docs" / "METRICS.md"


def snapshot(num_drafts: int) -> dict:
    stats = EngineStats()
    for _ in range(num_drafts):
        stats.observe_drafts(4, 2)
        stats.observe_k(4)
    stats.step_cost_s = {"1": 0.02}
    stats.expected_acceptance = [0.5]
    stats.step_time_s.observe(0.03)
    stats.num_requests["stop"] += 2
    return {
        **stats.snapshot(),
        "num_running": 1,
        "num_waiting": 0,
        "kv_blocks": {"free": 5, "cached": 1, "used": 2},
        "seconds_since_step": 0.0,
        "step_limit_s": 10.0,
        "draft_lost": False,
        "speculation_enabled": True,
        "is_lossless": True,
        "user_config_refused": False,
    }


def series(page: str) -> dict[str, dict[tuple, float]]:
    out: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            out.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return out


def test_every_metric_of_the_table_is_on_the_page_and_no_other() -> None:
    page = series(render([ReplicaReport("a", "", snapshot(3))]))
    histograms = {spec.name for spec in METRICS if spec.kind == "histogram"}
    expected = {spec.name for spec in METRICS} - histograms
    expected |= {h + suffix for h in histograms for suffix in ("_bucket", "_count", "_sum")}
    assert set(page) == expected


def test_names_are_prefixed_and_carry_units() -> None:
    assert len({spec.name for spec in METRICS}) == len(METRICS)
    for spec in METRICS:
        assert spec.name.startswith("paceline_")
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        if spec.kind == "histogram":
            assert spec.name.endswith("_seconds")


def test_replicas_are_series_of_their_own() -> None:
    page = series(
        render([ReplicaReport("a", "", snapshot(3)), ReplicaReport("b", "", snapshot(4))])
    )
    drafts = page["paceline_drafts_total"]
    assert drafts == {(("replica", "a"),): 3.0, (("replica", "b"),): 4.0}


def test_acceptance_invariants() -> None:
    page = series(render([ReplicaReport("a", "", snapshot(3))]))

    def per_position(name: str) -> list[float]:
        values = {dict(labels)["position"]: value for labels, value in page[name].items()}
        return [values[str(i)] for i in range(len(values))]

    accepted = per_position("paceline_accepted_tokens_per_position_total")
    assert accepted == sorted(accepted, reverse=True) == [3, 3, 0, 0]
    assert sum(accepted) == page["paceline_accepted_tokens_total"][(("replica", "a"),)]
    assert per_position("paceline_draft_tokens_per_position_total") == [3, 3, 3, 3]


def test_a_histogram_is_cumulative() -> None:
    page = series(render([ReplicaReport("a", "", snapshot(0))]))
    buckets = {
        float(dict(labels)["le"]): value
        for labels, value in page["paceline_step_time_seconds_bucket"].items()
    }
    assert buckets[0.025] == 0 and buckets[0.05] == 1 and buckets[float("inf")] == 1


def test_the_page_before_the_first_request_has_no_nan() -> None:
    page = render([ReplicaReport("a", "", snapshot(0))])
    values = [line.rsplit(" ", 1)[1] for line in page.splitlines() if not line.startswith("#")]
    assert values and not any(math.isnan(float(value)) for value in values)
    assert 'paceline_drafts_total{replica="a"} 0.0' in page


def test_a_replica_that_cannot_be_reached_shows_as_unhealthy() -> None:
    page = series(render([ReplicaReport("", "lost", {}), ReplicaReport("a", "", snapshot(0))]))
    healthy = page["paceline_engine_healthy"]
    assert sorted(healthy.values()) == [0.0, 1.0]


def test_the_docs_are_the_table() -> None:
    assert DOCS.read_text() == as_markdown(), "run: python -m deploy.metrics > docs/METRICS.md"
