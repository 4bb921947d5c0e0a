"""Counters and histograms of a replica, in plain Python. `deploy/metrics.py` exports them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TypedDict

_LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0, 60.0,
)  # fmt: skip
_GAP_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.1, 1.0,
)  # fmt: skip


class HistogramSnapshot(TypedDict):
    """`counts[i]` observations were at most `bounds[i]` and above the bound before; the last
    count, one more than there are bounds, is the rest. Counts are not cumulative."""

    bounds: list[float]
    counts: list[int]
    sum: float
    count: int


class Histogram:
    """Observations in fixed buckets."""

    def __init__(self, bounds: Sequence[float] = _LATENCY_BUCKETS_S) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0
        self.count = 0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times
        self.count += times

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0

    def snapshot(self) -> HistogramSnapshot:
        return {
            "bounds": list(self._bounds),
            "counts": list(self._counts),
            "sum": self.sum,
            "count": self.count,
        }


Snapshot = dict[
    str, float | list[int] | list[float] | dict[str, int] | dict[str, float] | HistogramSnapshot
]


class EngineStats:
    """What happened since start. Written by the loop's thread only; reading is always safe.

    A draft step counts when it had at least one real draft, and accepted counts are taken after a
    stop trimmed the run, so output tokens, usage and these counters always agree.
    """

    def __init__(self) -> None:
        self.num_requests: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.num_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_steps = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_draft_tokens_per_pos: list[int] = []
        self.num_accepted_tokens_per_pos: list[int] = []
        # How K is chosen: decoding steps of requests by their number of drafts; drafts that were
        # looked up and not sent; steps run to measure; and what is expected of a step by its rows,
        # and of a draft position where those before it were accepted.
        self.num_request_steps_per_k: list[int] = []
        self.num_unsent_draft_tokens = 0
        self.num_goodput_probes = 0
        self.step_cost_s: dict[str, float] = {}
        self.expected_acceptance: list[float] = []
        self.num_preemptions = 0
        self.num_drafter_failures = 0
        self.num_draft_losses = 0
        # Data parallelism: answers that did not come in time, agreements given up, dummy steps.
        self.num_dp_unanswered = 0
        self.num_dp_fallbacks = 0
        self.num_dp_dummy_steps = 0
        self.time_to_first_token_s = Histogram()
        self.inter_token_latency_s = Histogram()
        self.request_latency_s = Histogram()
        self.step_time_s = Histogram()
        self.forward_time_s = Histogram()
        self.forward_gap_s = Histogram(_GAP_BUCKETS_S)
        self.draft_time_s = Histogram()
        self.dp_wait_s = Histogram()

    def observe_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """One request's verification in one step."""
        if num_drafts == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        while len(self.num_draft_tokens_per_pos) < num_drafts:
            self.num_draft_tokens_per_pos.append(0)
            self.num_accepted_tokens_per_pos.append(0)
        for i in range(num_drafts):
            self.num_draft_tokens_per_pos[i] += 1
        for i in range(num_accepted):
            self.num_accepted_tokens_per_pos[i] += 1

    def observe_k(self, num_drafts: int) -> None:
        """A decoding request's step had so many drafts."""
        missing = num_drafts + 1 - len(self.num_request_steps_per_k)
        self.num_request_steps_per_k += [0] * missing
        self.num_request_steps_per_k[num_drafts] += 1

    @property
    def acceptance_length(self) -> float:
        """Mean output tokens of a verification with drafts, the extra token included."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def snapshot(self) -> Snapshot:
        """All numbers, as plain values under the attribute names."""
        out: Snapshot = {"acceptance_length": self.acceptance_length}
        for name, value in vars(self).items():
            if isinstance(value, Histogram):
                out[name] = value.snapshot()
            elif isinstance(value, (list, dict)):
                out[name] = value.copy()
            else:
                out[name] = value
        return out
