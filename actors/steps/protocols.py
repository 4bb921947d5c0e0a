"""The contracts between the verifier and what it drives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from actors.steps.messages import DraftTokens, Int32Array, RowStats, StepPlan


class TargetRunnerLike(Protocol):
    """A target shard as the step sees it."""

    def run(self, plan: StepPlan, drafts: DraftTokens | None) -> RowStats:
        """Execute the plan's target part. `drafts` fills the pending rows."""


class DraftHostLike(Protocol):
    """A draft model as the step sees it."""

    def run(self, plan: StepPlan) -> DraftTokens:
        """Execute the plan's draft part: feed, then draft. Also called without draft entries, to
        follow admissions and block tables."""


class StepClient(Protocol):
    """The verifier's side of one step, whatever carries it (same process or sockets)."""

    def send(self, plan: StepPlan) -> None:
        """Start a step. At most one step is in flight."""

    def recv(self, timeout_s: float) -> RowStats:
        """Result of the step in flight. Raises WorkerLost or StepTimeout."""

    def close(self) -> None:
        """End the workers' loops. Idempotent."""


class TurnLike(Protocol):
    """What a data-parallel rank does next: a step whose K follows `batch`, or a dummy step."""

    @property
    def batch(self) -> int: ...
    @property
    def is_dummy(self) -> bool: ...


class GangLike(Protocol):
    """The other data-parallel ranks, as the step loop sees them (`parallel.data_parallel`)."""

    num_unanswered: int
    rank: int

    def share(self, value: bytes | None, timeout_s: float) -> bytes:
        """What rank 0 says to all. Before the first turn, and once."""

    def check(self) -> None:
        """Raise when the gang has fallen apart; takes no time. For waits before the first turn."""

    @property
    def is_lockstep(self) -> bool:
        """Whether every rank must run as many forwards as the others."""

    def next_turn(self, batch: int) -> TurnLike | None:
        """Agree on the next step, of `batch` requests here. None: no agreement, static K."""

    def idle(self) -> None:
        """There is no work here: the others need not wait."""

    def wait_idle(self, timeout_s: float) -> TurnLike | None:
        """Lockstep: the dummy step that an idle rank must run now, if one comes in time."""

    def close(self) -> None:
        """Leave."""


class LookupDrafter(Protocol):
    """A drafter that needs tokens only and runs in the verifier's process.

    Deterministic given the tokens. A context is the request's known tokens, prompt and output,
    unverified drafts excluded; `max_drafts` is at least 1.
    """

    def propose(self, key: int, token_ids: Int32Array, max_drafts: int) -> Sequence[int]:
        """Up to `max_drafts` draft tokens that continue `token_ids` (int32 [T])."""

    def forget(self, key: int) -> None:
        """Drop all state of request `key`."""
