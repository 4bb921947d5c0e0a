"""How the same drafts reach every target rank in the same step.

Rank 0 hears of them, from draft processes or from a drafter of its own, and broadcasts. How much is
sent follows from the plan, which every rank has, so no rank can wait for what another does not
send. A lost drafter is part of the message: all ranks go on without drafts, or none does. q is not
sent: each rank reads its columns where they were written.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from actors.steps.drafts import Received, SentProposal, share_of_rows
from actors.steps.messages import DraftTokens, StepPlan, token_array
from actors.steps.protocols import Proposal, Verified
from actors.steps.target_step import Proposed, no_drafts
from parallel.groups import TPGroup
from parallel.transport.frames import TransportError
from parallel.transport.shared import SharedReader, SharedRows

_NUM_FIELDS = len(SharedRows._fields)


class Inbox(Protocol):
    """What rank 0 has and the others lack (`actors.steps.drafts`)."""

    def receive(self, plan: StepPlan) -> Received: ...
    def absorb(self, plan: StepPlan, verified: Verified) -> None: ...
    def close(self) -> None: ...


class QColumns:
    """Reads this rank's columns of q.

    Args:
        columns: [begin, end) of the vocabulary on this rank.
        num_shares: Processes among which the requests are divided by slot.
        device: Of the result.
    """

    def __init__(self, columns: tuple[int, int], num_shares: int, device: torch.device) -> None:
        self._begin, self._end = columns
        self._num_shares = num_shares
        self._device = device
        self._reader = SharedReader()
        self._generation = 0

    def open(self, plan: StepPlan, sent: SentProposal) -> Tensor | None:
        """float32 [sum(counts), columns] in the plan's order; None where the drafter has no q.

        Raises:
            TransportError: a writer is gone.
        """
        if not sent.q:
            return None
        if plan.draft_generation != self._generation:
            self._reader.close()  # the writers are others now
            self._generation = plan.draft_generation
        owner = share_of_rows(plan, sent.tokens, self._num_shares)
        q = np.zeros((len(owner), self._end - self._begin), dtype=np.float32)
        for index, rows in enumerate(sent.q):
            own = self._reader.read(rows, self._begin, self._end)
            first = max(rows.first - self._begin, 0)
            share = index if self._num_shares > 1 else 0
            q[owner == share, first : first + own.shape[1]] = own
        return torch.from_numpy(q).to(self._device)


class SharedDrafts:
    """A `DraftSource` for each rank of a target: what rank 0 received.

    Args:
        inbox: Where rank 0 hears of drafts; None on other ranks.
        group: The target's ranks.
        device: Of the group's tensors.
        q: Of this rank.
    """

    def __init__(
        self, inbox: Inbox | None, group: TPGroup, device: torch.device, q: QColumns
    ) -> None:
        assert (inbox is not None) == (group.rank == 0), "rank 0 hears of drafts, no other"
        self._inbox = inbox
        self._group = group
        self._device = device
        self._q = q

    def propose(self, plan: StepPlan) -> Proposed:
        sent: SentProposal | None = None
        lost: str | None = None
        if self._inbox is not None:
            sent, lost = self._inbox.receive(plan)
        if not any(entry.num_drafts > 0 for entry in plan.draft):
            # The others need not know whether rank 0's drafter is well.
            return (None, lost) if lost is not None else (Proposal(no_drafts(plan)), None)
        sent = self._broadcast(plan, sent)
        if sent is None:
            return None, lost or "rank 0 got no drafts"
        try:
            q, failure = self._q.open(plan, sent), None
        except TransportError as error:
            q, failure = None, str(error)
        if sent.q and not all_agree(failure is None, self._group, self._device):
            return None, failure or "q could not be read on another rank"
        return Proposal(sent.tokens, sent.confidences, q), None

    def absorb(self, plan: StepPlan, verified: Verified) -> None:
        if self._inbox is not None:
            self._inbox.absorb(plan, verified)

    def close(self) -> None:
        if self._inbox is not None:
            self._inbox.close()

    def _broadcast(self, plan: StepPlan, sent: SentProposal | None) -> SentProposal | None:
        """Rank 0's `sent` on every rank. Fields: whether there are drafts, whether confidences,
        how many parts q has; the parts; counts, ids, bits of the confidences."""
        asked = [entry.num_drafts for entry in plan.draft if entry.num_drafts > 0]
        parts = 3 + self._group.size * _NUM_FIELDS
        ids = parts + len(asked)
        known = ids + sum(asked)
        message = np.zeros(known + sum(asked), dtype=np.int64)
        if sent is not None:
            num_drafts = len(sent.tokens.token_ids)
            message[:3] = 1, sent.confidences is not None, len(sent.q)
            flat = [field for rows in sent.q for field in rows]
            message[3 : 3 + len(flat)] = flat
            message[parts:ids] = sent.tokens.counts
            message[ids : ids + num_drafts] = sent.tokens.token_ids
            if sent.confidences is not None:
                bits = np.ascontiguousarray(sent.confidences, dtype=np.float32).view(np.int32)
                message[known : known + num_drafts] = bits
        message = self._group.broadcast(torch.from_numpy(message).to(self._device)).cpu().numpy()
        if not message[0]:
            return None
        counts = token_array(message[parts:ids])
        end = int(counts.sum())
        fields = message[3 : 3 + int(message[2]) * _NUM_FIELDS].reshape(-1, _NUM_FIELDS)
        return SentProposal(
            DraftTokens(plan.step, token_array(message[ids : ids + end]), counts),
            token_array(message[known : known + end]).view(np.float32) if message[1] else None,
            tuple(SharedRows(*row) for row in fields.tolist()),
        )


def all_agree(is_well: bool, group: TPGroup, device: torch.device) -> bool:
    """Whether it is well on every rank of `group`."""
    mine = torch.tensor([is_well], dtype=torch.int64, device=device)
    return bool(group.all_gather(mine).all())


def gather_rows(rows: SharedRows, group: TPGroup, device: torch.device) -> tuple[SharedRows, ...]:
    """Where each rank of a split draft has written. Returns once all have."""
    if group.size == 1:
        return (rows,)
    found = group.all_gather(torch.tensor(rows, dtype=torch.int64, device=device))
    return tuple(SharedRows(*fields) for fields in found.tolist())
