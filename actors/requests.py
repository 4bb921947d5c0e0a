"""What a caller asks of an engine and what it gets back, whoever carries it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b


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
    unless `include_stop_str_in_output`. `max_tokens` None: up to the context's end. Requests with
    different `cache_salt` share neither cached KV nor what a lookup drafter has learned.
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
    cache_salt: str | None = None


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

    A stream begins with a run of nothing, an acknowledgment: an engine has queued the request.
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

    @classmethod
    def acknowledgment(cls, request_id: str, num_prompt_tokens: int) -> RunOutput:
        """The first item of a stream."""
        return cls(request_id, (), "", (), None, num_prompt_tokens, 0, 0)

    @property
    def is_acknowledgment(self) -> bool:
        is_empty = not (self.token_ids or self.text)
        return is_empty and self.finish_reason is None and self.error is None


def drawn_seed(base: int | None, number: int) -> int:
    """A seed in [0, 2^63): fresh, or that of the `number`-th request of a server with a seed."""
    raw = os.urandom(8)
    if base is not None:
        raw = blake2b(f"{base} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little") >> 1
