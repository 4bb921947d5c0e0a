"""The workers' end of a step: the whole main loop of a target rank and of a draft rank."""

from __future__ import annotations

import logging
from collections.abc import Callable

from actors.steps.drafts import SentProposal, host_rows, own_share
from actors.steps.messages import DraftTokens, FrameKind, RowMasks, StepPlan
from actors.steps.protocols import Drafter
from actors.steps.target_step import TargetStep
from parallel.transport.frames import ConnectionLost, Frame, TransportError, TransportTimeout
from parallel.transport.shared import SharedRows, SharedWriter
from parallel.transport.socket import FrameSocket

logger = logging.getLogger(__name__)

_ERROR_TIMEOUT_S = 1.0
_PATIENCE_S = 3600.0

# Where all ranks of a draft have written their parts of q, from where this one did.
GatherRows = Callable[[SharedRows], tuple[SharedRows, ...]]


class _Stopped(Exception):
    """The verifier said stop, or is gone."""


def serve_target(connection: FrameSocket, step: TargetStep, *, answers: bool = True) -> None:
    """Run plans until the verifier says stop or is gone. Only rank 0 `answers`.

    Raises:
        Exception: whatever ended a step; the verifier has been told.
    """

    def masks(plan: StepPlan, drafts: DraftTokens | None) -> RowMasks:
        if answers:
            body = b"" if drafts is None else drafts.pack()
            connection.send(FrameKind.DRAFTS, plan.step, body, plan.limit_s)
        frame = _next(connection, FrameKind.MASKS)
        if frame.step != plan.step:
            raise TransportError(f"masks of step {frame.step} in step {plan.step}")
        return RowMasks.unpack(frame.body)

    def handle(plan: StepPlan) -> None:
        result = step.run(plan, masks)
        if answers:
            connection.send(FrameKind.RESULT, plan.step, result.pack(), _PATIENCE_S)

    _serve(connection, handle)


def serve_draft(
    connection: FrameSocket,
    drafter: Drafter,
    target: FrameSocket | None,
    *,
    share: int = 0,
    num_shares: int = 1,
    first_column: int = 0,
    gather: GatherRows = lambda rows: (rows,),
) -> None:
    """Draft for plans until the verifier says stop or is gone.

    Drafts go straight to target rank 0. They are sent, empty, also when the plan only feeds: the
    target waits for them, which keeps the draft process from falling behind. A plan without draft
    entries only updates tables.

    Args:
        connection: To the verifier.
        drafter: A whole one or this rank's part.
        target: To target rank 0; None on ranks that do not speak.
        share: Of `num_shares`, among which the requests are divided by slot.
        num_shares: See above.
        first_column: Of this rank's q in the vocabulary.
        gather: Over the draft's ranks; called where the drafter gives q.
    """
    writer = SharedWriter("drafts")

    def handle(plan: StepPlan) -> None:
        proposal = drafter.propose(own_share(plan, share, num_shares))
        q: tuple[SharedRows, ...] = ()
        if proposal.q is not None:
            q = gather(writer.write(host_rows(proposal.q), first_column))
        if plan.draft and target is not None:
            body = SentProposal(proposal.tokens, proposal.confidences, q).pack()
            target.send(FrameKind.DRAFTS, plan.step, body, plan.limit_s)

    try:
        _serve(connection, handle)
    finally:
        writer.close()


def _serve(connection: FrameSocket, handle: Callable[[StepPlan], None]) -> None:
    while True:
        try:
            frame = _next(connection, FrameKind.PLAN)
        except _Stopped:
            return
        try:
            handle(StepPlan.unpack(frame.body))
        except _Stopped:
            return
        except Exception as error:
            text = f"{type(error).__name__}: {error}".encode()
            try:
                connection.send(FrameKind.ERROR, frame.step, text, _ERROR_TIMEOUT_S)
            except TransportError:
                logger.debug("the verifier was gone before it could hear of the error")
                if isinstance(error, ConnectionLost):
                    return
            raise


def _next(connection: FrameSocket, kind: FrameKind) -> Frame:
    """The next frame, which has to be of `kind`. An idle replica sends none for long."""
    while True:
        try:
            frame = connection.recv(_PATIENCE_S)
        except TransportTimeout:
            continue
        except ConnectionLost:
            raise _Stopped from None
        if frame.kind == FrameKind.STOP:
            raise _Stopped
        if frame.kind != kind:
            raise TransportError(f"frame kind {frame.kind} where {kind.name} was expected")
        return frame
