"""Figures of a run. Times are in milliseconds, rates per second."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from deploy.bench.load import Outcome, Progress
from deploy.bench.server import Workload

Json = dict[str, Any]
PERCENTILES: Final = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of `values` lie, between neighbours in proportion.

    `values` must not be empty.
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(
    progress: Progress, workload: Workload, drafts: Mapping[str, float] | None = None
) -> Json:
    """All figures of a run, complete or not.

    Args:
        progress: What was measured.
        workload: What was asked.
        drafts: Counted by the server during the run, where its usage says nothing of drafts.
    """
    done = [o for o in progress.outcomes if o.received.error is None]
    failed = [o for o in progress.outcomes if o.received.error is not None]
    wall_s = max(progress.ended_at - progress.started_at, 1e-9)
    figures = {
        "num_completed": len(done),
        "num_failed": len(failed),
        "num_cut": progress.num_cut,
        "errors": dict(Counter(str(o.received.error) for o in failed)),
        "stopped": progress.stopped,
        "wall_s": round(wall_s, 3),
        "requests_per_s": round(len(done) / wall_s, 4),
        "output_tokens_per_s": round(sum(map(output_tokens, done)) / wall_s, 3),
        "client_cpu_share": round(progress.cpu_s / wall_s, 4),
        **_of_requests(done),
    }
    if drafts is not None and figures["speculation"] is None:
        figures["speculation"] = _speculation(drafts)
    categories = sorted({workload.prompt(o.index).category for o in done})
    if len(categories) > 1:
        figures["categories"] = {
            name: _of_requests([o for o in done if workload.prompt(o.index).category == name])
            for name in categories
        }
    return figures


def output_tokens(outcome: Outcome) -> int:
    """Tokens of an answer: from its usage, where there is none the number of its events."""
    usage = outcome.received.usage
    return int(usage["completion_tokens"]) if usage else outcome.received.num_events


def _of_requests(done: Sequence[Outcome]) -> Json:
    firsts, per_token, latencies, gaps, events = [], [], [], [], 0
    for outcome in done:
        received = outcome.received
        latencies.append(outcome.ended_at - outcome.due_at)
        gaps += received.gaps_s
        events += received.num_events
        if received.first_text_at is None or received.last_at is None:
            continue
        firsts.append(received.first_text_at - outcome.due_at)
        if (later := output_tokens(outcome) - 1) > 0:
            per_token.append((received.last_at - received.first_text_at) / later)
    usages = [o.received.usage for o in done if o.received.usage]
    tokens = sum(map(output_tokens, done))
    return {
        "output_tokens": tokens,
        "prompt_tokens": sum(int(u.get("prompt_tokens") or 0) for u in usages),
        "cached_tokens": sum(
            int((u.get("prompt_tokens_details") or {}).get("cached_tokens") or 0) for u in usages
        ),
        "time_to_first_token_ms": _spread(firsts),
        "time_per_output_token_ms": _spread(per_token),
        "event_gap_ms": _spread(gaps),
        "latency_ms": _spread(latencies),
        "tokens_per_event": round(tokens / events, 3) if events else None,
        "speculation": _speculation_of(usages),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    spread = {f"p{p}": round(percentile(seconds, p) * 1e3, 3) for p in PERCENTILES}
    return {**spread, "mean": round(sum(seconds) / len(seconds) * 1e3, 3)}


def _speculation_of(usages: Iterable[Mapping[str, Any]]) -> Json | None:
    totals: Counter[str] = Counter()
    for usage in usages:
        for key, value in (usage.get("speculation") or {}).items():
            if key.startswith("num_") and isinstance(value, int):
                totals[key] += value
    return _speculation(totals) if totals else None


def _speculation(totals: Mapping[str, float]) -> Json:
    """Acceptance of all requests together; `mean_k`: drafts a step, steps without any included."""
    drafts, drafted = totals["num_drafts"], totals["num_draft_tokens"]
    accepted, steps = totals["num_accepted_tokens"], totals.get("num_steps")
    return {
        **{key: int(value) for key, value in totals.items()},
        "acceptance_length": round(1 + accepted / drafts, 4) if drafts else 1.0,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
        "mean_k": round(drafted / steps, 4) if steps else None,
    }
