"""The contracts between the verifier and what it drives, and between the verifier and its users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from actors.messages import DraftTokens, Int32Array, RowStats, StepPlan


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


class FinishReason(StrEnum):
    """Why a request ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation, as the engine takes it. Limits are checked by the verifier at admission.

    `speculation_enabled` and `num_speculative_tokens` only lower what the server allows.
    `stop` strings are found in the decoded text; text and tokens end before the stop string
    unless `include_stop_str_in_output`. `max_tokens` None: up to the context's end.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    num_logprobs: int = -1
    speculation_enabled: bool = True
    num_speculative_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Raw log-probability of an output token; `top` the most likely (id, logprob) pairs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Speculation counters of one request. Accepted counts are taken after stop trimming."""

    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """Mean output tokens of a step that had drafts: 1 + accepted / drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


@dataclass(frozen=True, slots=True)
class RunOutput:
    """A run of tokens of one request: what one step produced. The last one has `finish_reason`.

    `text` is what became decodable with this run (a multi-byte character's head is held back).
    `accepted` marks, token by token, which were accepted drafts. Counts are totals so far.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    accepted: tuple[bool, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    error: str | None = None
