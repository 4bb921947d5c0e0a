"""What verifier, target and draft say to each other. Frozen values with a compact wire form.

A request is known to workers by its `slot`: a row in [0, max_num_seqs) that the verifier assigns
at admission and reuses after the request ends. Positions are 0-based indices into
`prompt + output`. Bodies are msgpack lists; token ids travel as little-endian int32 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


# Sampled id of a row whose logits are not numbers: the verifier fails that request.
INVALID_SAMPLE = -1


def _ids(raw: bytes) -> Int32Array:
    return np.frombuffer(raw, dtype="<i4")


def token_array(ids: Any) -> Int32Array:
    """`ids` (list, tuple or array of ints) as a contiguous int32 array."""
    return np.ascontiguousarray(ids, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class SlotParams:
    """What a worker must know of a request to produce its target samples.

    `seed` is always set (drawn at admission when the user gave none), so a preempted or moved
    request sees the same noise. `temperature` 0 means greedy. `masked_ids` are forbidden while
    the output is shorter than `min_tokens` (EOS and stop ids). `num_logprobs`: -1 none, 0 the
    sampled token's only, n > 0 the n most likely too.
    """

    slot: int
    prompt_len: int
    seed: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    masked_ids: tuple[int, ...] = ()
    num_logprobs: int = -1

    def to_wire(self) -> list[Any]:
        return [
            self.slot, self.prompt_len, self.seed, self.temperature, self.top_k, self.top_p,
            self.min_p, self.min_tokens, list(self.masked_ids), self.num_logprobs,
        ]  # fmt: skip

    @classmethod
    def from_wire(cls, raw: list[Any]) -> SlotParams:
        raw = list(raw)
        raw[8] = tuple(raw[8])
        return cls(*raw)


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """KV block ids of `slot` from table index `first` on; what lies behind them is void."""

    slot: int
    first: int
    block_ids: Int32Array


@dataclass(frozen=True, slots=True)
class TargetEntry:
    """One request's rows in the target forward.

    Rows are `token_ids` at positions `start, start+1, ...`, followed by `num_pending_drafts`
    rows whose tokens come from a draft process in the same step. The last `num_logits` rows get
    a target sample: 0 for a prompt chunk that does not reach the last known token, else 1 + the
    number of drafts. The last `num_drafts` of `token_ids` are drafts already in the plan.
    """

    slot: int
    start: int
    token_ids: Int32Array
    num_drafts: int
    num_pending_drafts: int
    num_logits: int


@dataclass(frozen=True, slots=True)
class DraftEntry:
    """One request's work for a draft process: feed `token_ids` from position `start` (the
    draft KV is valid below it), then draft `num_drafts` tokens. `num_drafts` 0 only keeps the
    draft KV whole."""

    slot: int
    start: int
    token_ids: Int32Array
    num_drafts: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: draft, then verify. `admissions` and `blocks` come before the entries use them."""

    generation: int
    step: int
    admissions: tuple[SlotParams, ...] = ()
    blocks: tuple[BlockDelta, ...] = ()
    target: tuple[TargetEntry, ...] = ()
    draft: tuple[DraftEntry, ...] = ()

    @property
    def num_logits(self) -> int:
        return sum(e.num_logits for e in self.target)

    def pack(self) -> bytes:
        body = [
            self.generation,
            self.step,
            [a.to_wire() for a in self.admissions],
            [[b.slot, b.first, b.block_ids.astype("<i4").tobytes()] for b in self.blocks],
            [
                [e.slot, e.start, e.token_ids.astype("<i4").tobytes(), e.num_drafts,
                 e.num_pending_drafts, e.num_logits]
                for e in self.target
            ],
            [
                [e.slot, e.start, e.token_ids.astype("<i4").tobytes(), e.num_drafts]
                for e in self.draft
            ],
        ]  # fmt: skip
        packed: bytes = msgpack.packb(body)
        return packed

    @classmethod
    def unpack(cls, raw: bytes) -> StepPlan:
        generation, step, admissions, blocks, target, draft = msgpack.unpackb(raw)
        return cls(
            generation,
            step,
            tuple(SlotParams.from_wire(a) for a in admissions),
            tuple(BlockDelta(s, f, _ids(b)) for s, f, b in blocks),
            tuple(TargetEntry(s, p, _ids(t), d, q, n) for s, p, t, d, q, n in target),
            tuple(DraftEntry(s, p, _ids(t), d) for s, p, t, d in draft),
        )


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Drafts of one step, in the order of `StepPlan.draft` entries with `num_drafts > 0`.

    `token_ids` is the concatenation; `counts` how many each entry got (at most what was asked).
    """

    step: int
    token_ids: Int32Array
    counts: Int32Array

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb(
            [self.step, self.token_ids.astype("<i4").tobytes(), self.counts.astype("<i4").tobytes()]
        )
        return packed

    @classmethod
    def unpack(cls, raw: bytes) -> DraftTokens:
        step, ids, counts = msgpack.unpackb(raw)
        return cls(step, _ids(ids), _ids(counts))


_EMPTY_I = np.empty(0, dtype=np.int32)
_EMPTY_F = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class RowStats:
    """What the target ranks reduce a step's logits to, one item a logits row in plan order.

    `sampled` [N]: the target's own sample, position noise applied. `logprobs` [N]: its raw
    log-probability, NaN where no request asked. `top_ids` / `top_logprobs` [N, n]: the n most
    likely tokens, n the largest number asked in the step (0 columns when none did).
    `drafts`: what a draft process proposed in this step, None when the plan asked for none.
    `draft_lost`: why the drafts are missing; the step itself is valid without them. An entry
    whose pending drafts came short has correspondingly fewer rows: `num_rows` [entries].
    """

    step: int
    sampled: Int32Array
    num_rows: Int32Array
    logprobs: Float32Array = field(default_factory=lambda: _EMPTY_F)
    top_ids: Int32Array = field(default_factory=lambda: _EMPTY_I.reshape(0, 0))
    top_logprobs: Float32Array = field(default_factory=lambda: _EMPTY_F.reshape(0, 0))
    drafts: DraftTokens | None = None
    draft_lost: str | None = None
    forward_ms: float = 0.0
    draft_ms: float = 0.0

    def pack(self) -> bytes:
        n = self.top_ids.shape[1] if self.top_ids.size else 0
        packed: bytes = msgpack.packb(
            [
                self.step,
                self.sampled.astype("<i4").tobytes(),
                self.num_rows.astype("<i4").tobytes(),
                self.logprobs.astype("<f4").tobytes(),
                n,
                self.top_ids.astype("<i4").tobytes(),
                self.top_logprobs.astype("<f4").tobytes(),
                self.drafts.pack() if self.drafts is not None else None,
                self.draft_lost,
                self.forward_ms,
                self.draft_ms,
            ]
        )
        return packed

    @classmethod
    def unpack(cls, raw: bytes) -> RowStats:
        (step, sampled, num_rows, logprobs, n, top_ids, top_lp, drafts, lost, fwd, dms) = (
            msgpack.unpackb(raw)
        )
        rows = -1 if n else 0
        return cls(
            step,
            _ids(sampled),
            _ids(num_rows),
            np.frombuffer(logprobs, dtype="<f4"),
            _ids(top_ids).reshape(rows, n),
            np.frombuffer(top_lp, dtype="<f4").reshape(rows, n),
            DraftTokens.unpack(drafts) if drafts is not None else None,
            lost,
            fwd,
            dms,
        )
