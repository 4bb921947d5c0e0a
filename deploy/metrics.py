"""All metrics, in one table: names with units, help, labels, and where the value comes from.

`docs/METRICS.md` is this table as text (`python -m deploy.metrics > docs/METRICS.md`). Values are
kept by the engines (`actors.stats`) and gathered from every replica when someone scrapes, so it
does not matter which ingress replica answers. Every series has the label `replica`; a label of the
table comes on top.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from actors.stats import EngineStats
from deploy.engine_client import ReplicaReport

CONTENT_TYPE: Final = "text/plain; version=0.0.4"
Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. `source` is a key of the engine's snapshot.

    A labelled metric reads a mapping (label value -> number) or a list (index -> number).
    Histogram buckets are the engine's.
    """

    name: str
    kind: Kind
    source: str
    help: str
    label: str | None = None


HEALTHY: Final = MetricSpec(
    "paceline_engine_healthy",
    "gauge",
    "",
    "1 when the replica's engine passes its health check, 0 when it does not or cannot be reached.",
)

METRICS: Final[tuple[MetricSpec, ...]] = (
    HEALTHY,
    MetricSpec(
        "paceline_requests_total",
        "counter",
        "num_requests",
        "Finished requests: stop, length, abort (the client left) or error.",
        "finish_reason",
    ),
    MetricSpec(
        "paceline_running_requests", "gauge", "num_running", "Requests in the running batch."
    ),
    MetricSpec("paceline_waiting_requests", "gauge", "num_waiting", "Requests waiting for room."),
    MetricSpec(
        "paceline_prompt_tokens_total",
        "counter",
        "num_prompt_tokens",
        "Prompt tokens of admitted requests.",
    ),
    MetricSpec(
        "paceline_cached_prompt_tokens_total",
        "counter",
        "num_cached_prompt_tokens",
        "Prompt tokens whose KV came from the prefix cache.",
    ),
    MetricSpec(
        "paceline_output_tokens_total",
        "counter",
        "num_output_tokens",
        "Output tokens after stop trimming; equals the sum of usage.completion_tokens.",
    ),
    MetricSpec(
        "paceline_time_to_first_token_seconds",
        "histogram",
        "time_to_first_token_s",
        "From a request's arrival at the engine to its first output token.",
    ),
    MetricSpec(
        "paceline_inter_token_latency_seconds",
        "histogram",
        "inter_token_latency_s",
        "Time between two steps of a request over the tokens the later one gave, once per token.",
    ),
    MetricSpec(
        "paceline_request_latency_seconds",
        "histogram",
        "request_latency_s",
        "From a request's arrival at the engine to its end.",
    ),
    MetricSpec("paceline_steps_total", "counter", "num_steps", "Engine steps completed."),
    MetricSpec(
        "paceline_step_time_seconds",
        "histogram",
        "step_time_s",
        "From sending a step's plan to the commit of its results. Output of the step before is "
        "delivered meanwhile; making the plan is not counted.",
    ),
    MetricSpec(
        "paceline_forward_time_seconds",
        "histogram",
        "forward_time_s",
        "The target's forward and reduction to row statistics, per step.",
    ),
    MetricSpec(
        "paceline_forward_gap_seconds",
        "histogram",
        "forward_gap_s",
        "From the end of a forward of the target to the start of the next, where there was work "
        "throughout: what planning, sampling, acceptance and transport add to a step. Drafting "
        "with a model is not counted.",
    ),
    MetricSpec(
        "paceline_draft_time_seconds",
        "histogram",
        "draft_time_s",
        "Drafting with a draft model, per step in which it ran; lookup drafters are not timed.",
    ),
    MetricSpec(
        "paceline_drafts_total",
        "counter",
        "num_drafts",
        "Verifications with at least one draft token, one per request and step.",
    ),
    MetricSpec(
        "paceline_draft_tokens_total", "counter", "num_draft_tokens", "Draft tokens verified."
    ),
    MetricSpec(
        "paceline_accepted_tokens_total",
        "counter",
        "num_accepted_tokens",
        "Draft tokens accepted. Acceptance length = 1 + accepted_tokens / drafts.",
    ),
    MetricSpec(
        "paceline_draft_tokens_per_position_total",
        "counter",
        "num_draft_tokens_per_pos",
        "Draft tokens verified at each draft position, 0 first.",
        "position",
    ),
    MetricSpec(
        "paceline_accepted_tokens_per_position_total",
        "counter",
        "num_accepted_tokens_per_pos",
        "Draft tokens accepted at each draft position, 0 first. Over drafts_total this is the "
        "unconditional acceptance rate of the position.",
        "position",
    ),
    MetricSpec(
        "paceline_request_steps_per_k_total",
        "counter",
        "num_request_steps_per_k",
        "Steps of decoding requests by the draft tokens verified in them; k=0 is plain decoding.",
        "k",
    ),
    MetricSpec(
        "paceline_unsent_draft_tokens_total",
        "counter",
        "num_unsent_draft_tokens",
        "Draft tokens that were looked up and not verified, because they would have cost more time "
        "than they save.",
    ),
    MetricSpec(
        "paceline_goodput_probes_total",
        "counter",
        "num_goodput_probes",
        "Steps whose K was chosen to measure costs or acceptance again, not because it was best.",
    ),
    MetricSpec(
        "paceline_step_cost_seconds",
        "gauge",
        "step_cost_s",
        "Expected time of a decoding step by its rows (requests plus draft tokens), drafting not "
        "included; K follows it. Empty where K does not follow goodput.",
        "rows",
    ),
    MetricSpec(
        "paceline_expected_acceptance",
        "gauge",
        "expected_acceptance",
        "Expected acceptance of each draft position, 0 first, where those before it were accepted; "
        "requests and kinds of drafts differ from it. Empty where K does not follow goodput.",
        "position",
    ),
    MetricSpec(
        "paceline_drafter_failures_total",
        "counter",
        "num_drafter_failures",
        "Drafter errors; each costs one draft, never a request.",
    ),
    MetricSpec(
        "paceline_draft_losses_total",
        "counter",
        "num_draft_losses",
        "Times a draft process was lost and drafting stopped until it was back.",
    ),
    MetricSpec(
        "paceline_preemptions_total",
        "counter",
        "num_preemptions",
        "Requests put back to waiting for lack of KV blocks.",
    ),
    MetricSpec(
        "paceline_dp_unanswered_total",
        "counter",
        "num_dp_unanswered",
        "Steps in which this data-parallel rank heard nothing from its coordinator in time.",
    ),
    MetricSpec(
        "paceline_dp_fallbacks_total",
        "counter",
        "num_dp_fallbacks",
        "Times data-parallel ranks gave up agreeing on K and took the static one.",
    ),
    MetricSpec(
        "paceline_dp_dummy_steps_total",
        "counter",
        "num_dp_dummy_steps",
        "Steps without requests, run to keep data-parallel ranks in lockstep.",
    ),
    MetricSpec(
        "paceline_dp_wait_seconds",
        "histogram",
        "dp_wait_s",
        "Time a step waited for the other data-parallel ranks' batch sizes.",
    ),
    MetricSpec(
        "paceline_kv_blocks",
        "gauge",
        "kv_blocks",
        "KV blocks by state: free, cached (free, with reusable content) or used.",
        "state",
    ),
    MetricSpec(
        "paceline_last_step_age_seconds",
        "gauge",
        "seconds_since_step",
        "Time since the last completed step while there is work; 0 when idle.",
    ),
    MetricSpec(
        "paceline_step_limit_seconds",
        "gauge",
        "step_limit_s",
        "What the step in flight may take before the replica counts as hung; follows the steps "
        "before, unless step_timeout_s is set.",
    ),
    MetricSpec(
        "paceline_draft_process_lost",
        "gauge",
        "draft_lost",
        "1 while a draft process is lost and the engine decodes without it.",
    ),
    MetricSpec(
        "paceline_speculation_enabled",
        "gauge",
        "speculation_enabled",
        "1 while speculation is switched on at run time.",
    ),
    MetricSpec(
        "paceline_speculation_lossless",
        "gauge",
        "is_lossless",
        "1 when outputs follow exactly the target's distribution.",
    ),
    MetricSpec(
        "paceline_user_config_refused",
        "gauge",
        "user_config_refused",
        "1 while the last user_config was refused and the one before is in use; /server_info says "
        "why.",
    ),
)


class _Families:
    """Prometheus families of all replicas' snapshots."""

    def __init__(self, snapshots: Mapping[str, Mapping[str, Any]]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        for spec in METRICS:
            yield _family(spec, self._snapshots)


def _family(spec: MetricSpec, snapshots: Mapping[str, Mapping[str, Any]]) -> Metric:
    labels = ("replica",) if spec.label is None else ("replica", spec.label)
    if spec.kind == "histogram":
        histogram = HistogramMetricFamily(spec.name, spec.help, labels=labels)
        for replica, snapshot in snapshots.items():
            if (value := snapshot.get(spec.source)) is not None:
                buckets = list(_cumulative(value["bounds"], value["counts"]))
                histogram.add_metric([replica], buckets, value["sum"])
        return histogram
    make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = make(spec.name, spec.help, labels=labels)
    for replica, snapshot in snapshots.items():
        if (value := snapshot.get(spec.source)) is not None:
            for label_values, number in _series(value):
                family.add_metric([replica, *label_values], float(number))
    return family


def _series(value: Any) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(value, Mapping):
        yield from (((str(key),), number) for key, number in value.items())
    elif isinstance(value, list):
        yield from (((str(index),), number) for index, number in enumerate(value))
    else:
        yield (), value


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> Iterator[tuple[str, int]]:
    total = 0
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        total += count
        yield bound, total


def render(reports: Iterable[ReplicaReport]) -> str:
    """The text page of /metrics."""
    snapshots: dict[str, Mapping[str, Any]] = {}
    for number, report in enumerate(reports):
        name = report.replica or f"unreachable-{number}"
        snapshots[name] = {**report.stats, HEALTHY.source: 0 if report.reason else 1}
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(snapshots))
    return generate_latest(registry).decode()


def _listed(bounds: Sequence[float]) -> str:
    return ", ".join(f"{bound:g}" for bound in bounds)


def as_markdown() -> str:
    """The table as docs/METRICS.md has it."""
    lines = [
        "# Metrics",
        "",
        "Written by `python -m deploy.metrics`; do not edit. Served at `/metrics`. Every series",
        "has the label `replica`.",
        "",
        "| name | kind | label | meaning |",
        "|---|---|---|---|",
    ]
    for spec in METRICS:
        label = f"`{spec.label}`" if spec.label else ""
        lines.append(f"| `{spec.name}` | {spec.kind} | {label} | {spec.help} |")
    stats: dict[str, Any] = EngineStats().snapshot()
    common = stats["step_time_s"]["bounds"]
    lines += ["", f"Histogram buckets, in seconds: {_listed(common)}."]
    for spec in METRICS:
        if spec.kind == "histogram" and (bounds := stats[spec.source]["bounds"]) != common:
            lines.append(f"Those of `{spec.name}`: {_listed(bounds)}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
