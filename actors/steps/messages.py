"""What verifier, target and draft say to each other. Frozen values with a compact wire form.

A request is known to workers by its `slot`: a row in [0, max_num_seqs) that the verifier assigns
at admission and reuses after the request ends. Positions are 0-based indices into
`prompt + output`. Bodies are msgpack lists; token ids travel as little-endian int32 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class FrameKind(IntEnum):
    """What a frame's body is. 0 is the transport's hello."""

    PLAN = 1  # StepPlan, to every worker
    RESULT = 2  # RowStats, from target rank 0
    DRAFTS = 3  # of a draft process to target rank 0; of that to the verifier in two-phase steps
    STOP = 4  # empty, to every worker: end the loop
    ERROR = 5  # text, from a worker that cannot go on
    MASKS = 6  # RowMasks, from the verifier to every target rank in two-phase steps


# Sampled id of a row whose logits are not numbers: the verifier fails that request.
INVALID_SAMPLE = -1


def _ids(raw: bytes) -> Int32Array:
    return np.frombuffer(raw, dtype="<i4")


def token_array(ids: Any) -> Int32Array:
    """`ids` (list, tuple or array of ints) as a contiguous int32 array."""
    return np.ascontiguousarray(ids, dtype=np.int32)


def _pack_array(array: npt.NDArray[Any]) -> list[Any]:
    wire = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return [wire.dtype.str, list(wire.shape), wire.tobytes()]


def _unpack_array(raw: list[Any]) -> npt.NDArray[Any]:
    dtype, shape, data = raw
    return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)


class Stat(StrEnum):
    """Columns of `RowStats`: what can be known of a logits row. [N] unless a shape is given.

    p is the target's law of the row after every processor, q the draft's, d the draft token that
    the row checks. Rows without a draft (the bonus) hold NaN, or -1 for ids.
    """

    SAMPLED = "sampled"  # int32: the target's own sample, with the noise of its position
    LOGPROB = "logprob"  # float32: its raw log-probability, NaN where no request asked
    TOP_IDS = "top_ids"  # int32 [N, n]: the n likeliest tokens, n the most asked in the step
    TOP_LOGPROBS = "top_logprobs"  # float32 [N, n]
    TARGET_PROB = "target_prob"  # float64: p(d)
    DRAFT_PROB = "draft_prob"  # float64: q(d)
    RESIDUAL_ID = "residual_id"  # int32: a draw from max(p - q, 0), normalised
    RESIDUAL_MASS = "residual_mass"  # float64: sum(max(p - q, 0))
    ENTROPY = "entropy"  # float64: -sum(p ln p) over the likeliest tokens (three), in nats
    UNIFORM = "uniform"  # float64 in (0, 1): of the row's position and the step; by the verifier


@dataclass(frozen=True, slots=True)
class SlotParams:
    """What a worker must know of a request to produce its target samples.

    `seed` is always set (drawn at admission when the user gave none), so a preempted or moved
    request sees the same noise. `temperature` 0 means greedy. `masked_ids` are forbidden while
    the output is shorter than `min_tokens` (EOS and stop ids). `num_logprobs`: -1 none, 0 the
    sampled token's only, n > 0 the n most likely too. `history`: the known tokens at admission,
    for a request whose rows need those before them (penalties); None for all others.
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
    request_id: str = ""
    history: Int32Array | None = None

    def to_wire(self) -> list[Any]:
        history = None if self.history is None else self.history.astype("<i4").tobytes()
        return [
            self.slot, self.prompt_len, self.seed, self.temperature, self.top_k, self.top_p,
            self.min_p, self.min_tokens, list(self.masked_ids), self.num_logprobs,
            self.request_id, history,
        ]  # fmt: skip

    @classmethod
    def from_wire(cls, raw: list[Any]) -> SlotParams:
        raw = list(raw)
        raw[8] = tuple(raw[8])
        raw[11] = None if raw[11] is None else _ids(raw[11])
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
    """One request's work for a drafter that computes: feed, then draft.

    Entries of the drafter are valid below position `start`; `num_rows` are to be made from there
    on, then `num_drafts` tokens drafted after the newest known one. `num_drafts` 0 only keeps the
    drafter's KV whole. `token_ids` are the known tokens from position `first` on: those at the
    fed positions, or, where entries depend on the tokens that follow (`DraftLaw`), those after
    them. A drafter without KV has no rows to feed and gets the newest known token.
    """

    slot: int
    start: int
    num_rows: int
    first: int
    token_ids: Int32Array
    num_drafts: int


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Tokens that a grammar allows, for some logits rows of a step.

    `rows` [M]: which, in plan order. `bits` uint32 [M, ceil(V / 32)]: token t is allowed iff bit
    t % 32 of word t // 32 is set.
    """

    rows: Int32Array
    bits: npt.NDArray[np.uint32]

    def to_wire(self) -> list[Any]:
        return [_pack_array(self.rows), _pack_array(self.bits)]

    @classmethod
    def from_wire(cls, raw: list[Any]) -> RowMasks:
        return cls(_unpack_array(raw[0]), _unpack_array(raw[1]))

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb(self.to_wire())
        return packed

    @classmethod
    def unpack(cls, raw: bytes) -> RowMasks:
        return cls.from_wire(msgpack.unpackb(raw))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: draft, then verify. `admissions` and `blocks` come before the entries use them.

    `draft_generation` counts the drafters that this replica has had: drafts of an older one are
    void. `masks`: known already, for drafts that are in the plan. `awaits_masks`: a two-phase
    step; its drafts go to the verifier first, which answers with the masks of all rows.
    `limit_s`: seconds it may take; a process that makes others wait longer counts as hung.
    """

    generation: int
    step: int
    admissions: tuple[SlotParams, ...] = ()
    blocks: tuple[BlockDelta, ...] = ()
    target: tuple[TargetEntry, ...] = ()
    draft: tuple[DraftEntry, ...] = ()
    draft_generation: int = 0
    masks: RowMasks | None = None
    awaits_masks: bool = False
    limit_s: float = 60.0

    @property
    def num_logits(self) -> int:
        return sum(e.num_logits for e in self.target)

    @property
    def num_target_rows(self) -> int:
        """Of the target's forward."""
        return sum(len(e.token_ids) + e.num_pending_drafts for e in self.target)

    @property
    def num_rows(self) -> int:
        """Of the target's forward and of the drafter's."""
        return self.num_target_rows + sum(e.num_rows + e.num_drafts for e in self.draft)

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
                [e.slot, e.start, e.num_rows, e.first, e.token_ids.astype("<i4").tobytes(),
                 e.num_drafts]
                for e in self.draft
            ],
            self.draft_generation,
            None if self.masks is None else self.masks.to_wire(),
            self.awaits_masks,
            self.limit_s,
        ]  # fmt: skip
        packed: bytes = msgpack.packb(body)
        return packed

    @classmethod
    def unpack(cls, raw: bytes) -> StepPlan:
        generation, step, admissions, blocks, target, draft, drafter, masks, awaits, limit_s = (
            msgpack.unpackb(raw)
        )
        return cls(
            generation,
            step,
            tuple(SlotParams.from_wire(a) for a in admissions),
            tuple(BlockDelta(s, f, _ids(b)) for s, f, b in blocks),
            tuple(TargetEntry(s, p, _ids(t), d, q, n) for s, p, t, d, q, n in target),
            tuple(DraftEntry(s, p, n, f, _ids(t), d) for s, p, n, f, t, d in draft),
            drafter,
            None if masks is None else RowMasks.from_wire(masks),
            awaits,
            limit_s,
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


@dataclass(frozen=True, slots=True)
class RowStats:
    """What the target ranks reduce a step's logits to, one item a logits row in plan order.

    `columns`: by `Stat`; SAMPLED always, the others where a request or the acceptance method asks
    for them. `drafts`: what a drafter gave in this step, None when the plan asked for none.
    `draft_lost`: why the drafts are missing; the step itself is valid without them. An entry
    whose pending drafts came short has correspondingly fewer rows: `num_rows` [entries].
    `gap_ms`: from the end of the target's forward before to the start of this one, drafting in
    between left out; None where it is not known.
    """

    step: int
    num_rows: Int32Array
    columns: Mapping[str, npt.NDArray[Any]]
    drafts: DraftTokens | None = None
    draft_lost: str | None = None
    forward_ms: float = 0.0
    draft_ms: float = 0.0
    gap_ms: float | None = None

    @property
    def sampled(self) -> Int32Array:
        """int32 [N]: the target's own samples."""
        return self.columns[Stat.SAMPLED]

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb(
            [
                self.step,
                self.num_rows.astype("<i4").tobytes(),
                {str(name): _pack_array(column) for name, column in self.columns.items()},
                self.drafts.pack() if self.drafts is not None else None,
                self.draft_lost,
                self.forward_ms,
                self.draft_ms,
                self.gap_ms,
            ]
        )
        return packed

    @classmethod
    def unpack(cls, raw: bytes) -> RowStats:
        step, num_rows, columns, drafts, lost, *timings = msgpack.unpackb(raw)
        return cls(
            step,
            _ids(num_rows),
            {name: _unpack_array(column) for name, column in columns.items()},
            DraftTokens.unpack(drafts) if drafts is not None else None,
            lost,
            *timings,
        )
