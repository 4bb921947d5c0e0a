"""The verifier's end of a step: over sockets, or with the workers in this process.

Over sockets a plan goes to every target rank and to the draft process; drafts go from the draft
process straight to the target, and target rank 0 answers. The workers' ends are in
`actors.steps.serve`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from actors.errors import EngineDead, StepTimeout, WorkerLost
from actors.steps.drafts import HostedDrafter
from actors.steps.messages import DraftTokens, FrameKind, RowStats, StepPlan
from actors.steps.patience import DRAFT_SHARE
from actors.steps.protocols import Drafter, MaskSource, TargetRunnerLike
from actors.steps.target_step import TargetStep, concerns_draft
from parallel.transport.frames import ConnectionLost, TransportError, TransportTimeout
from parallel.transport.socket import FrameSocket, wait_any

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 1.0


class InProcessStepClient:
    """Runs the step in the calling thread, when the result is asked for.

    A drafter that raises is lost, as a draft process that died would be; a target that raises
    ends the step.
    """

    def __init__(self, target: TargetRunnerLike, drafter: Drafter | None = None) -> None:
        self._hosted = HostedDrafter(drafter)
        self._step = TargetStep(target, self._hosted)
        self._plan: StepPlan | None = None

    def send(self, plan: StepPlan) -> None:
        assert self._plan is None, "a step is in flight already"
        self._plan = plan

    def recv(self, timeout_s: float, mask_source: MaskSource | None = None) -> RowStats:
        plan, self._plan = self._plan, None
        if plan is None:
            raise EngineDead("no step is in flight")
        return self._step.run(plan, mask_source)

    def replace_drafter(self, drafter: Drafter, generation: int | None = None) -> None:
        """Use a rebuilt drafter, whose KV is empty, for the plans of `generation` (None: the one
        after the last plan's). `StepLoop.restore_draft` comes next."""
        if generation is None:
            generation = self._hosted.generation + 1
        self._hosted.offer(drafter, generation)

    def close(self) -> None:
        self._plan = None


class SocketStepClient:
    """Steps over one connection per worker process.

    Args:
        targets: Connections to the target ranks; the first is rank 0, which answers.
        drafts: Connections to the draft processes. Losing one is no error of the step: the
            target goes on without drafts and the result says so.

    A worker that does not take a plan within the plan's limit counts as hung.
    """

    def __init__(
        self,
        targets: Sequence[FrameSocket],
        drafts: Sequence[FrameSocket] = (),
    ) -> None:
        if not targets:
            raise ValueError("a step needs at least one target rank")
        self._targets = list(targets)
        self._drafts = list(drafts)
        self._plan: StepPlan | None = None
        self._draft_lost: str | None = None

    def send(self, plan: StepPlan) -> None:
        assert self._plan is None, "a step is in flight already"
        self._plan = plan
        body = plan.pack()
        if concerns_draft(plan):
            for connection in list(self._drafts):
                try:
                    connection.send(FrameKind.PLAN, plan.step, body, plan.limit_s * DRAFT_SHARE)
                except TransportError as error:
                    self._lose_drafts(str(error))
        self._tell_targets(FrameKind.PLAN, plan, body)

    def recv(self, timeout_s: float, mask_source: MaskSource | None = None) -> RowStats:
        plan, self._plan = self._plan, None
        if plan is None:
            raise EngineDead("no step is in flight")
        deadline = time.monotonic() + timeout_s
        result: RowStats | None = None
        while result is None:
            ready = wait_any([*self._targets, *self._drafts], deadline - time.monotonic())
            if not ready:
                raise StepTimeout(
                    f"target rank 0 did not answer step {plan.step} in {timeout_s:.1f} s (many "
                    "times what such steps took; step_timeout_s sets a limit of your own)"
                )
            for connection in ready:
                if connection in self._drafts:
                    self._hear_draft(connection)
                else:
                    result = self._hear_target(connection, plan, mask_source) or result
        if plan.draft and self._draft_lost is not None and result.draft_lost is None:
            result = replace(result, draft_lost=self._draft_lost)
        elif self._drafts and result.draft_lost is not None:
            self._lose_drafts(result.draft_lost)  # one that hangs would not take further plans
        return result

    def replace_drafts(self, drafts: Sequence[FrameSocket]) -> None:
        """Use a rebuilt draft group, whose KV is empty. `StepLoop.restore_draft` comes next."""
        self._lose_drafts("replaced")
        self._drafts = list(drafts)
        self._draft_lost = None

    def close(self) -> None:
        for connection in [*self._targets, *self._drafts]:
            if connection.is_open:
                try:
                    connection.send(FrameKind.STOP, 0, b"", _STOP_TIMEOUT_S)
                except TransportError:
                    logger.debug("a worker was gone before it could be stopped")
                connection.close()

    def _hear_target(
        self, connection: FrameSocket, plan: StepPlan, mask_source: MaskSource | None
    ) -> RowStats | None:
        rank = self._targets.index(connection)
        try:
            frame = connection.try_recv()
        except TransportError as error:
            raise _engine_error(error, f"target rank {rank}, step {plan.step}") from error
        if frame is None:
            return None
        if frame.kind == FrameKind.ERROR:
            raise EngineDead(f"target rank {rank}, step {plan.step}: {frame.body.decode()}")
        is_answer = rank == 0 and frame.step == plan.step
        if is_answer and frame.kind == FrameKind.DRAFTS and plan.awaits_masks:
            self._send_masks(plan, frame.body, mask_source)
            return None
        if not is_answer or frame.kind != FrameKind.RESULT:
            raise EngineDead(
                f"target rank {rank} sent frame kind {frame.kind} of step {frame.step} in step "
                f"{plan.step}"
            )
        return RowStats.unpack(frame.body)

    def _send_masks(self, plan: StepPlan, drafts: bytes, mask_source: MaskSource | None) -> None:
        assert mask_source is not None, "a two-phase step needs someone to ask for masks"
        masks = mask_source(plan, DraftTokens.unpack(drafts) if drafts else None)
        self._tell_targets(FrameKind.MASKS, plan, masks.pack())

    def _tell_targets(self, kind: FrameKind, plan: StepPlan, body: bytes) -> None:
        for rank, connection in enumerate(self._targets):
            try:
                connection.send(kind, plan.step, body, plan.limit_s)
            except TransportError as error:
                raise _engine_error(error, f"target rank {rank}, step {plan.step}") from error

    def _hear_draft(self, connection: FrameSocket) -> None:
        try:
            frame = connection.try_recv()
        except TransportError as error:
            self._lose_drafts(str(error))
            return
        if frame is not None:
            text = frame.body.decode() if frame.kind == FrameKind.ERROR else f"kind {frame.kind}"
            self._lose_drafts(f"the draft process sent: {text}")

    def _lose_drafts(self, why: str) -> None:
        """One lost draft rank takes the group with it."""
        for connection in self._drafts:
            connection.close()
        self._drafts = []
        self._draft_lost = why


def _engine_error(error: TransportError, where: str) -> EngineDead:
    if isinstance(error, ConnectionLost):
        return WorkerLost(f"{where}: {error}")
    if isinstance(error, TransportTimeout):
        return StepTimeout(f"{where}: {error}")
    return EngineDead(f"{where}: {error}")
