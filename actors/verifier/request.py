"""One request's state in the verifier."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import numpy as np

from actors.kvcache.block_table import BlockTable
from actors.kvcache.prefix_index import BlockHash
from actors.requests import GenerateRequest, RunOutput, SpeculationStats, drawn_seed
from actors.steps.messages import Int32Array, SlotParams, token_array
from actors.verifier.acceptance_rates import RequestRates
from actors.verifier.detokenize import TextStream
from actors.verifier.finish import FinishRules

Sink = Callable[[RunOutput], None]


class RequestStatus(Enum):
    """WAITING -> RUNNING -> FINISHED, with RUNNING -> PREEMPTED -> RUNNING in between."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_NEXT = {
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.RUNNING: {RequestStatus.PREEMPTED, RequestStatus.FINISHED},
    RequestStatus.PREEMPTED: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.FINISHED: set[RequestStatus](),
}

NO_DRAFTS = np.empty(0, dtype=np.int32)


class SpeculationCounts:
    """A request's speculation counters while it runs."""

    __slots__ = ("num_accepted_tokens", "num_draft_tokens", "num_drafts", "num_steps", "per_pos")

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.per_pos: list[int] = []

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        self.num_steps += 1
        if num_drafts:
            self.num_drafts += 1
            self.num_draft_tokens += num_drafts
            self.num_accepted_tokens += num_accepted
            while len(self.per_pos) < num_drafts:
                self.per_pos.append(0)
            for i in range(num_accepted):
                self.per_pos[i] += 1

    def snapshot(self) -> SpeculationStats:
        return SpeculationStats(
            self.num_steps,
            self.num_drafts,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            tuple(self.per_pos),
        )


class Request:
    """What the verifier knows of a request.

    `number` orders requests by arrival and is the key of drafter state. `num_computed_tokens` is
    the number of leading positions with valid target KV, `draft_len` that with final entries of a
    drafter that keeps KV; the newest token has neither. `drafts` are unverified and never part of
    `token_ids`. `num_wanted_drafts`: as many as pay in the next step, by what `rates` says of them;
    both are used only where K follows goodput.
    """

    __slots__ = (
        "_buffer",
        "arrival_s",
        "block_hashes",
        "counts",
        "draft_len",
        "drafts",
        "first_token_s",
        "last_token_s",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_tokens",
        "num_wanted_drafts",
        "number",
        "params",
        "prompt_len",
        "rates",
        "rules",
        "seed",
        "sink",
        "slot",
        "status",
        "table",
        "text",
    )

    def __init__(
        self,
        number: int,
        params: GenerateRequest,
        rules: FinishRules,
        text: TextStream | None,
        sink: Sink,
        arrival_s: float,
        base_seed: int | None = None,
    ) -> None:
        prompt = token_array(params.prompt_token_ids)
        self.number = number
        self.params = params
        self.rules = rules
        self.text = text
        self.sink = sink
        # Drawn once and kept: a preempted or moved request must see the same noise again.
        self.seed = params.seed if params.seed is not None else drawn_seed(base_seed, number)
        self.status = RequestStatus.WAITING
        self.prompt_len = len(prompt)
        self.num_tokens = len(prompt)
        self._buffer = np.empty(len(prompt) + 64, dtype=np.int32)
        self._buffer[: len(prompt)] = prompt
        self.num_computed_tokens = 0
        self.draft_len = 0
        self.drafts: Int32Array = NO_DRAFTS
        self.slot = -1
        self.table: BlockTable | None = None
        self.block_hashes: list[BlockHash] = []
        self.num_cached_tokens: int | None = None  # prefix hit of the first admission
        self.counts = SpeculationCounts()
        self.rates = RequestRates()
        self.num_wanted_drafts = 0
        self.arrival_s = arrival_s
        self.first_token_s: float | None = None
        self.last_token_s = 0.0

    def __repr__(self) -> str:
        return (
            f"Request({self.params.request_id!r}, {self.status.value}, slot {self.slot}, prompt "
            f"{self.prompt_len}, output {self.num_output_tokens}, computed "
            f"{self.num_computed_tokens}, draft_len {self.draft_len}, drafts {len(self.drafts)})"
        )

    @property
    def token_ids(self) -> Int32Array:
        """Known tokens, prompt and output. A view: valid until tokens are appended."""
        return self._buffer[: self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens without target KV: 1 while decoding, more before a prefill is done."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether its next step is for the newest output token alone, and drafts after it."""
        return self.num_pending_tokens == 1 and self.num_output_tokens > 0

    @property
    def speculates(self) -> bool:
        """False: this request never drafts, by its own wish."""
        return self.params.speculation_enabled and self.params.num_speculative_tokens != 0

    def append(self, token_ids: list[int]) -> None:
        end = self.num_tokens + len(token_ids)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), dtype=np.int32)
            grown[: self.num_tokens] = self._buffer[: self.num_tokens]
            self._buffer = grown
        self._buffer[self.num_tokens : end] = token_ids
        self.num_tokens = end

    def drop_drafts(self) -> None:
        self.drafts = NO_DRAFTS

    def advance(self, status: RequestStatus) -> None:
        """Change the status. Leaving RUNNING voids everything tied to the slot and its KV."""
        assert status in _NEXT[self.status], f"{self!r} cannot become {status.value}"
        self.status = status
        if status is not RequestStatus.RUNNING:
            assert self.table is None and self.slot == -1, f"{self!r} still holds blocks or a slot"
            self.drop_drafts()
            if status is RequestStatus.PREEMPTED:
                self.num_computed_tokens = 0
                self.draft_len = 0

    def slot_params(self) -> SlotParams:
        """What the workers are told at admission to the slot."""
        p = self.params
        masked = tuple(sorted(self.rules.ending_ids)) if p.min_tokens > 0 else ()
        return SlotParams(
            slot=self.slot,
            prompt_len=self.prompt_len,
            seed=self.seed,
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            min_tokens=p.min_tokens,
            masked_ids=masked,
            num_logprobs=p.num_logprobs,
            request_id=p.request_id,
        )
