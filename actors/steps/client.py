"""The two ways a step reaches the workers: in this process, or over sockets.

Over sockets a plan goes to every target rank and to the draft process; drafts go from the draft
process straight to the target, and target rank 0 answers. Both ends are here, so that the
protocol is in one place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum

from actors.errors import EngineDead, StepTimeout, WorkerLost
from actors.steps.messages import DraftTokens, RowStats, StepPlan, token_array
from actors.steps.protocols import DraftHostLike, TargetRunnerLike
from parallel.transport.frames import ConnectionLost, Frame, TransportError, TransportTimeout
from parallel.transport.socket import FrameListener, FrameSocket, wait_any

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 1.0
_PATIENCE_S = 3600.0

DraftSource = Callable[[StepPlan], tuple[DraftTokens | None, str | None]]
StepHandler = Callable[[StepPlan], bytes | None]


class FrameKind(IntEnum):
    """What a frame's body is. 0 is the transport's hello."""

    PLAN = 1  # StepPlan, to every worker
    RESULT = 2  # RowStats, from target rank 0
    DRAFTS = 3  # DraftTokens, from a draft process to target ranks
    STOP = 4  # empty, to every worker: end the loop
    ERROR = 5  # text, from a worker that cannot go on


def no_drafts(plan: StepPlan) -> DraftTokens:
    """An answer to the plan's draft entries without a single draft."""
    num_entries = sum(1 for entry in plan.draft if entry.num_drafts > 0)
    return DraftTokens(plan.step, token_array([]), token_array([0] * num_entries))


# --- in this process --------------------------------------------------------------------------


class InProcessStepClient:
    """Runs draft and target in the calling thread, when the result is asked for.

    A draft model that raises is lost, as a draft process that died would be; a target that
    raises ends the step.
    """

    def __init__(self, target: TargetRunnerLike, draft: DraftHostLike | None = None) -> None:
        self._target = target
        self._draft = draft
        self._plan: StepPlan | None = None

    def send(self, plan: StepPlan) -> None:
        assert self._plan is None, "a step is in flight already"
        self._plan = plan

    def recv(self, timeout_s: float) -> RowStats:
        plan, self._plan = self._plan, None
        if plan is None:
            raise EngineDead("no step is in flight")
        if self._draft is not None and not plan.draft and concerns_draft(plan):
            self._run_draft(plan)
        return run_target(self._target, plan, self._run_draft)

    def replace_draft(self, draft: DraftHostLike) -> None:
        """Use a rebuilt draft model, whose KV is empty. `StepLoop.restore_draft` comes next."""
        self._draft = draft

    def close(self) -> None:
        self._plan = None

    def _run_draft(self, plan: StepPlan) -> tuple[DraftTokens | None, str | None]:
        if self._draft is None:
            return None, "no draft model"
        try:
            return self._draft.run(plan), None
        except Exception as error:
            logger.exception("the draft model failed")
            self._draft = None
            return None, repr(error)


def concerns_draft(plan: StepPlan) -> bool:
    """A draft model has entries to run, or block tables to follow for those that come later."""
    return bool(plan.draft or plan.blocks or plan.admissions)


def run_target(target: TargetRunnerLike, plan: StepPlan, source: DraftSource | None) -> RowStats:
    """The target's part of a step, with drafts from `source` where the plan asks for them."""
    if not plan.draft or source is None:
        return target.run(plan, None)
    started = time.perf_counter()
    drafts, lost = source(plan)
    draft_ms = (time.perf_counter() - started) * 1e3
    result = target.run(plan, drafts if drafts is not None else no_drafts(plan))
    return replace(result, drafts=drafts, draft_lost=lost, draft_ms=draft_ms)


# --- the verifier's end -----------------------------------------------------------------------


class SocketStepClient:
    """Steps over one connection per worker process.

    Args:
        targets: Connections to the target ranks; the first is rank 0, which answers.
        drafts: Connections to the draft processes. Losing one is no error of the step: the
            target goes on without drafts and the result says so.
        send_timeout_s: A worker that does not take a plan for that long counts as hung.
    """

    def __init__(
        self,
        targets: Sequence[FrameSocket],
        drafts: Sequence[FrameSocket] = (),
        send_timeout_s: float = 10.0,
    ) -> None:
        if not targets:
            raise ValueError("a step needs at least one target rank")
        self._targets = list(targets)
        self._drafts = list(drafts)
        self._send_timeout_s = send_timeout_s
        self._plan: StepPlan | None = None
        self._draft_lost: str | None = None

    def send(self, plan: StepPlan) -> None:
        assert self._plan is None, "a step is in flight already"
        self._plan = plan
        body = plan.pack()
        if concerns_draft(plan):
            for connection in list(self._drafts):
                try:
                    connection.send(FrameKind.PLAN, plan.step, body, self._send_timeout_s)
                except TransportError as error:
                    self._lose_drafts(str(error))
        for rank, connection in enumerate(self._targets):
            try:
                connection.send(FrameKind.PLAN, plan.step, body, self._send_timeout_s)
            except TransportError as error:
                raise _engine_error(error, f"target rank {rank}, step {plan.step}") from error

    def recv(self, timeout_s: float) -> RowStats:
        plan, self._plan = self._plan, None
        if plan is None:
            raise EngineDead("no step is in flight")
        deadline = time.monotonic() + timeout_s
        result: RowStats | None = None
        while result is None:
            ready = wait_any([*self._targets, *self._drafts], deadline - time.monotonic())
            if not ready:
                raise StepTimeout(f"target rank 0 did not answer step {plan.step} in {timeout_s} s")
            for connection in ready:
                if connection in self._drafts:
                    self._hear_draft(connection)
                else:
                    result = self._hear_target(connection, plan) or result
        if plan.draft and self._draft_lost is not None and result.draft_lost is None:
            result = replace(result, draft_lost=self._draft_lost)
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

    def _hear_target(self, connection: FrameSocket, plan: StepPlan) -> RowStats | None:
        rank = self._targets.index(connection)
        try:
            frame = connection.try_recv()
        except TransportError as error:
            raise _engine_error(error, f"target rank {rank}, step {plan.step}") from error
        if frame is None:
            return None
        if frame.kind == FrameKind.ERROR:
            raise EngineDead(f"target rank {rank}, step {plan.step}: {frame.body.decode()}")
        if frame.kind != FrameKind.RESULT or rank != 0 or frame.step != plan.step:
            raise EngineDead(
                f"target rank {rank} sent frame kind {frame.kind} of step {frame.step} in step "
                f"{plan.step}"
            )
        return RowStats.unpack(frame.body)

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


# --- the workers' ends ------------------------------------------------------------------------


def serve_steps(connection: FrameSocket, handler: StepHandler) -> None:
    """Answer plans until the verifier says stop or is gone. The worker's whole main loop.

    Args:
        connection: To the verifier.
        handler: Gets each plan; its bytes, if any, are sent back as the step's result. What it
            raises is reported to the verifier and raised here.
    """
    while True:
        try:
            frame = _next_frame(connection)
        except ConnectionLost:
            return
        if frame.kind == FrameKind.STOP:
            return
        if frame.kind != FrameKind.PLAN:
            raise TransportError(f"frame kind {frame.kind} where a plan was expected")
        try:
            answer = handler(StepPlan.unpack(frame.body))
        except Exception as error:
            text = f"{type(error).__name__}: {error}".encode()
            try:
                connection.send(FrameKind.ERROR, frame.step, text, _STOP_TIMEOUT_S)
            except TransportError:
                logger.debug("the verifier was gone before it could hear of the error")
            raise
        if answer is not None:
            try:
                connection.send(FrameKind.RESULT, frame.step, answer, _PATIENCE_S)
            except ConnectionLost:
                return


def _next_frame(connection: FrameSocket) -> Frame:
    while True:
        try:
            return connection.recv(_PATIENCE_S)
        except TransportTimeout:
            continue  # an idle replica sends no plans


def target_handler(
    target: TargetRunnerLike, source: DraftSource | None = None, answers: bool = True
) -> StepHandler:
    """Handler of a target rank. Only rank 0 `answers`.

    `source` gives the drafts of a plan; with more than one rank it must give every rank the same
    (rank 0 listens and broadcasts).
    """

    def handle(plan: StepPlan) -> bytes | None:
        result = run_target(target, plan, source)
        return result.pack() if answers else None

    return handle


class DraftReceiver:
    """The target's end of the connection from the draft process: a `DraftSource`.

    Once a step's drafts did not come the draft process counts as lost, and its connection is
    closed: what it sends later would belong to a KV state that the verifier has given up.
    """

    def __init__(self, connection: FrameSocket, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s

    def __call__(self, plan: StepPlan) -> tuple[DraftTokens | None, str | None]:
        deadline = time.monotonic() + self._timeout_s
        try:
            while True:
                frame = self._connection.recv(max(deadline - time.monotonic(), 0.0))
                if frame.kind == FrameKind.DRAFTS and frame.step == plan.step:
                    return DraftTokens.unpack(frame.body), None
                if frame.step > plan.step:
                    raise TransportError(f"drafts of step {frame.step} in step {plan.step}")
        except TransportError as error:
            self.close()
            return None, f"no drafts for step {plan.step}: {error}"

    def close(self) -> None:
        self._connection.close()


class ReconnectingDrafts:
    """A `DraftSource` that takes over the next draft processes once the last ones were lost.

    The verifier plans no draft work until a rebuilt draft process serves, so a plan that asks for
    drafts means that its connection is there or about to be.

    Args:
        listener: Where draft processes connect.
        connect_timeout_s: For each to connect.
        step_timeout_s: For the drafts of a step.
        num_shares: Processes among which the requests are divided by slot. One that is lost takes
            the others with it.
    """

    def __init__(
        self,
        listener: FrameListener,
        connect_timeout_s: float = 10.0,
        step_timeout_s: float = 30.0,
        num_shares: int = 1,
    ) -> None:
        self._listener = listener
        self._connect_timeout_s = connect_timeout_s
        self._step_timeout_s = step_timeout_s
        self._num_shares = num_shares
        self._receivers: dict[int, DraftReceiver] = {}

    def __call__(self, plan: StepPlan) -> tuple[DraftTokens | None, str | None]:
        while len(self._receivers) < self._num_shares:
            try:
                connection, hello = self._listener.accept(self._connect_timeout_s)
            except TransportError as error:
                self._drop()
                return None, f"no draft process connected: {error}"
            self._receivers[hello.rank] = DraftReceiver(connection, self._step_timeout_s)
        parts: list[DraftTokens] = []
        for rank in sorted(self._receivers):
            drafts, lost = self._receivers[rank](plan)
            if drafts is None:
                self._drop()
                return None, lost
            parts.append(drafts)
        return merge_shares(plan, parts), None

    def _drop(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers = {}


class DraftShare:
    """One of several whole drafts: drafts for its own slots and follows the tables of all."""

    def __init__(self, draft: DraftHostLike, share: int, num_shares: int) -> None:
        self._draft = draft
        self._share = share
        self._num_shares = num_shares

    def run(self, plan: StepPlan) -> DraftTokens:
        own = tuple(e for e in plan.draft if e.slot % self._num_shares == self._share)
        return self._draft.run(replace(plan, draft=own))


def merge_shares(plan: StepPlan, parts: Sequence[DraftTokens]) -> DraftTokens:
    """The drafts of all shares, in the plan's order."""
    if len(parts) == 1:
        return parts[0]
    taken = [0] * len(parts)
    begins = [0] * len(parts)
    counts: list[int] = []
    token_ids: list[int] = []
    for entry in plan.draft:
        if entry.num_drafts == 0:
            continue
        share = entry.slot % len(parts)
        count = int(parts[share].counts[taken[share]])
        begin = begins[share]
        token_ids += parts[share].token_ids[begin : begin + count].tolist()
        counts.append(count)
        taken[share] += 1
        begins[share] += count
    return DraftTokens(plan.step, token_array(token_ids), token_array(counts))


def draft_handler(
    draft: DraftHostLike, targets: Sequence[FrameSocket], send_timeout_s: float = 10.0
) -> StepHandler:
    """Handler of the draft rank that speaks: drafts go straight to the target ranks.

    They are sent, empty, also when the plan only feeds: the target waits for them, which keeps
    the draft process from falling behind. A plan without draft entries only updates tables.
    """

    def handle(plan: StepPlan) -> bytes | None:
        drafts = draft.run(plan)
        if plan.draft:
            body = drafts.pack()
            for connection in targets:
                connection.send(FrameKind.DRAFTS, plan.step, body, send_timeout_s)
        return None

    return handle
