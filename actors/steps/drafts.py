"""Where drafts come from: a drafter in this process, or processes that drafters have to themselves.

Either is lost when it fails once, and stays so until the verifier counts a new drafter
(`StepPlan.draft_generation`): whatever an old one still says is never taken for the new one's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from actors.steps.messages import DraftTokens, Float32Array, FrameKind, StepPlan, token_array
from actors.steps.patience import DRAFT_SHARE
from actors.steps.protocols import Drafter, Proposal, Verified
from actors.steps.target_step import Proposed, concerns_draft
from parallel.transport.frames import TransportError
from parallel.transport.shared import SharedRows, SharedWriter
from parallel.transport.socket import FrameListener, FrameSocket

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


# --- a proposal between processes -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SentProposal:
    """A `Proposal` on its way to another process: q stays in its writers' shared memory.

    `q`: one for each process that has a part. Of one draft these are ranges of columns, of several
    shares the rows of each share, in its own order.
    """

    tokens: DraftTokens
    confidences: Float32Array | None = None
    q: tuple[SharedRows, ...] = ()

    def pack(self) -> bytes:
        known = None if self.confidences is None else self.confidences.astype("<f4").tobytes()
        packed: bytes = msgpack.packb([self.tokens.pack(), known, self.q])
        return packed

    @classmethod
    def unpack(cls, raw: bytes) -> SentProposal:
        tokens, known, q = msgpack.unpackb(raw)
        confidences = None if known is None else np.frombuffer(known, dtype="<f4")
        return cls(DraftTokens.unpack(tokens), confidences, tuple(SharedRows(*part) for part in q))


Received = tuple[SentProposal | None, str | None]


def own_share(plan: StepPlan, share: int, num_shares: int) -> StepPlan:
    """The plan for one of several whole drafts, which divide the requests by slot. It follows the
    tables of all."""
    if num_shares == 1:
        return plan
    own = tuple(entry for entry in plan.draft if entry.slot % num_shares == share)
    return replace(plan, draft=own)


def share_of_rows(plan: StepPlan, tokens: DraftTokens, num_shares: int) -> np.ndarray:
    """int64 [sum(counts)]: which share each draft of the plan came from."""
    shares = [entry.slot % num_shares for entry in plan.draft if entry.num_drafts > 0]
    return np.repeat(np.asarray(shares, dtype=np.int64), tokens.counts)


def merge_shares(plan: StepPlan, parts: Sequence[SentProposal]) -> SentProposal:
    """The drafts of all shares, in the plan's order."""
    if len(parts) == 1:
        return parts[0]
    shares = [entry.slot % len(parts) for entry in plan.draft if entry.num_drafts > 0]
    counts = np.zeros(len(shares), dtype=np.int32)
    for share, part in enumerate(parts):
        counts[[i for i, s in enumerate(shares) if s == share]] = part.tokens.counts
    owner = np.repeat(np.asarray(shares, dtype=np.int64), counts)
    ids = np.zeros(len(owner), dtype=np.int32)
    known = np.zeros(len(owner), dtype=np.float32)
    has_confidences = all(part.confidences is not None for part in parts)
    for share, part in enumerate(parts):
        ids[owner == share] = part.tokens.token_ids
        if has_confidences:
            known[owner == share] = part.confidences
    return SentProposal(
        DraftTokens(plan.step, token_array(ids), counts),
        known if has_confidences else None,
        tuple(rows for part in parts for rows in part.q),
    )


# --- a drafter in this process ----------------------------------------------------------------


def _nothing() -> None:
    return


@dataclass(slots=True)
class _Seated:
    drafter: Drafter
    generation: int
    leave: Callable[[], None]  # its communicator


class HostedDrafter:
    """A `DraftSource`: the drafter, or this rank's part of it, lives in this process.

    One that raises is lost, as a draft process that died would be, and is let go of, so that there
    is room for the next.

    Args:
        drafter: None on ranks that hold no part of it.
        leave: Closes the drafter's communicator: the other ranks must not wait for this one.
        agree: Of a drafter split over ranks: whether it is well here to whether it is everywhere.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        leave: Callable[[], None] = _nothing,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self._seated = _Seated(drafter, 0, leave) if drafter is not None else None
        self._agree = agree
        self._offered: _Seated | None = None
        self._failure: str | None = None
        self._writer: SharedWriter | None = None
        self.generation = 0  # of the last plan

    def offer(
        self, drafter: Drafter, generation: int, leave: Callable[[], None] = _nothing
    ) -> None:
        """A new drafter, for the plans of `generation`. From any thread, between steps or not."""
        self.withdraw()
        self._offered = _Seated(drafter, generation, leave)

    def withdraw(self) -> None:
        """Let go of what was offered and not taken."""
        offered, self._offered = self._offered, None
        if offered is not None:
            offered.leave()

    def propose(self, plan: StepPlan) -> Proposed:
        self._take_over(plan.draft_generation)
        if not concerns_draft(plan):
            return None, None
        if self._seated is None:
            return None, self._failure or "there is no drafter here"
        proposal: Proposal | None = None
        if self._failure is None:
            try:
                proposal = self._seated.drafter.propose(plan)
            except Exception as error:
                self._fail(error)
        if not self._agree(proposal is not None):
            self._fail("the drafter failed on another rank")
            self._seated = None
            return None, self._failure
        return proposal, None

    def receive(self, plan: StepPlan) -> Received:
        """As `propose`, for ranks that have no part of the drafter."""
        proposal, lost = self.propose(plan)
        if proposal is None:
            return None, lost
        q: tuple[SharedRows, ...] = ()
        if proposal.q is not None:
            if self._writer is None:
                self._writer = SharedWriter("drafts")
            q = (self._writer.write(host_rows(proposal.q)),)
        return SentProposal(proposal.tokens, proposal.confidences, q), None

    def absorb(self, plan: StepPlan, verified: Verified) -> None:
        if self._seated is not None and self._failure is None:
            try:
                self._seated.drafter.absorb(plan, verified)
            except Exception as error:
                self._fail(error)  # the other ranks hear of it when the next drafts are due

    def close(self) -> None:
        self.withdraw()
        if self._seated is not None:
            self._seated.leave()
            self._seated = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _take_over(self, generation: int) -> None:
        self.generation = generation
        offered = self._offered
        if offered is not None and offered.generation == generation:
            self._seated, self._offered, self._failure = offered, None, None

    def _fail(self, error: Exception | str) -> None:
        if isinstance(error, Exception):
            logger.error("the drafter failed", exc_info=error)
        if self._failure is None:
            self._failure = error if isinstance(error, str) else repr(error)
        if self._seated is not None:
            self._seated.leave()


def host_rows(q: Tensor) -> Any:
    """float32 numpy rows of a tensor on whatever device."""
    return q.detach().float().cpu().numpy()


# --- drafters in processes of their own -------------------------------------------------------


class ConnectedDrafts:
    """A `DraftSource`: draft processes send what they draft.

    The verifier plans no work for a drafter before it serves, so a plan of a new generation means
    that its connections are there or about to be. They are waited for, as drafts are, for a part
    of what the step may take: a process that hangs costs speed, not the step.

    Args:
        listener: Where draft processes connect, each with the generation of its drafter.
        num_shares: Processes among which the requests are divided by slot. One that is lost takes
            the others with it.
        open_q: q of a proposal, this rank's columns, from its writers' memory.
    """

    def __init__(
        self,
        listener: FrameListener,
        num_shares: int = 1,
        open_q: Callable[[StepPlan, SentProposal], Tensor | None] = lambda plan, sent: None,
    ) -> None:
        self._listener = listener
        self._num_shares = num_shares
        self._open_q = open_q
        self._connections: dict[int, FrameSocket] = {}
        self._generation = -1
        self._lost: str | None = None

    def propose(self, plan: StepPlan) -> Proposed:
        sent, lost = self.receive(plan)
        if sent is None:
            return None, lost
        try:
            return Proposal(sent.tokens, sent.confidences, self._open_q(plan, sent)), None
        except TransportError as error:
            return None, self._lose(plan, error)

    def receive(self, plan: StepPlan) -> Received:
        """The drafts of a plan that asks for some, as they came."""
        if not plan.draft:
            return None, None
        if plan.draft_generation != self._generation:
            self._drop()
            self._generation = self._listener.generation = plan.draft_generation
            self._lost = None
        if self._lost is not None:
            return None, self._lost
        deadline = monotonic() + plan.limit_s * DRAFT_SHARE
        try:
            while len(self._connections) < self._num_shares:
                connection, hello = self._listener.accept(max(deadline - monotonic(), 0.0))
                self._connections[hello.rank] = connection
            parts = [self._next(plan, self._connections[r], deadline) for r in self._ranks]
            return merge_shares(plan, parts), None
        except TransportError as error:
            return None, self._lose(plan, error)

    def absorb(self, plan: StepPlan, verified: Verified) -> None:
        return

    def close(self) -> None:
        self._drop()
        self._listener.close()

    @property
    def _ranks(self) -> list[int]:
        return sorted(self._connections)

    def _next(self, plan: StepPlan, connection: FrameSocket, deadline: float) -> SentProposal:
        while True:
            frame = connection.recv(max(deadline - monotonic(), 0.0))
            if frame.kind == FrameKind.DRAFTS and frame.step == plan.step:
                return SentProposal.unpack(frame.body)
            if frame.step > plan.step:
                raise TransportError(f"drafts of step {frame.step} came")

    def _lose(self, plan: StepPlan, error: TransportError) -> str:
        """What these processes send later would belong to a KV state that is given up."""
        self._drop()
        self._lost = f"no drafts for step {plan.step}: {error}"
        return self._lost

    def _drop(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections = {}
