"""A rank's end of the agreement."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass

from parallel.gang.rounds import BATCH, MAX_DELAY_S, SEND_S, WATCHDOG_S, Kind
from parallel.transport.frames import Frame, TransportError, TransportTimeout
from parallel.transport.socket import FrameSocket
from parallel.transport.tcp import TcpAddress, TcpFrameSocket

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a rank does next: a step whose K follows `batch`, or a dummy step of that K."""

    batch: int
    is_dummy: bool = False


class GangMember:
    """A rank's end of the agreement. One thread, the step loop's, calls everything but `close`.

    Args:
        address: Of the coordinator.
        rank: Data-parallel rank.
        digest: Of the configuration.
        max_delay_s: As the coordinator's.
        lockstep: As the coordinator's.
        timeout_s: To find the coordinator.
        watchdog_s: Silence after which it counts as dead; in lockstep beyond a step's limit.
    """

    def __init__(
        self,
        address: TcpAddress,
        rank: int,
        digest: str,
        max_delay_s: float = MAX_DELAY_S,
        *,
        lockstep: bool = False,
        timeout_s: float = 120.0,
        watchdog_s: float = WATCHDOG_S,
    ) -> None:
        self.rank = rank
        # The coordinator answers within max_delay_s of the first report, if it gets the processor.
        self._patience_s = 4 * max_delay_s
        self._watchdog_s = watchdog_s
        self._lockstep = lockstep
        self._step = 0
        self._is_outstanding = False
        self._is_idle = True
        self._silent_since: float | None = None
        self._last_batch = 0
        self._early: deque[Frame] = deque()  # came before the first turn
        self.num_unanswered = 0
        self.fallback: str | None = None
        self._connection: FrameSocket = TcpFrameSocket.dial(address, "dp", rank, 0, rank, timeout_s)
        self._connection.send(Kind.DIGEST, 0, digest.encode(), SEND_S)
        answer = self._connection.recv(timeout_s)
        if answer.kind != Kind.DIGEST:
            self._connection.close()
            raise TransportError(f"rank {rank} may not join the gang: {answer.body.decode()}")

    @property
    def is_lockstep(self) -> bool:
        return self._lockstep

    def share(self, value: bytes | None, timeout_s: float) -> bytes:
        """Rank 0's `value` on every rank. Before the first turn, and once.

        Raises:
            TransportError: the gang has fallen apart, or rank 0 says nothing in time.
        """
        if self.rank == 0:
            assert value is not None
            self._connection.send(Kind.SHARE, 0, value, SEND_S)
            return value
        frame = self._connection.recv(timeout_s)
        if frame.kind == Kind.FALLBACK:
            raise TransportError(frame.body.decode())
        if frame.kind != Kind.SHARE:
            raise TransportError(f"the coordinator sent frame kind {frame.kind}")
        return frame.body

    def check(self) -> None:
        """For waits before the first turn.

        Raises:
            TransportError: the gang has fallen apart.
        """
        while (frame := self._connection.try_recv()) is not None:
            if frame.kind == Kind.FALLBACK:
                raise TransportError(frame.body.decode())
            self._early.append(frame)

    def next_turn(self, batch: int, step_limit_s: float = 0.0) -> Turn | None:
        """Agree on a step of `batch` (at least 1) requests. None: no agreement, static K.

        Waits a few times `max_delay_s` at most; an answer that did not come by then is replaced
        by the last one. In lockstep the other ranks are waited for: their step may take
        `step_limit_s`, and the watchdog's time on top.
        """
        if self.fallback is not None:
            return None
        try:
            if not self._is_outstanding:
                self._step += 1
                self._connection.send(Kind.REPORT, self._step, BATCH.pack(batch), SEND_S)
                self._is_outstanding, self._is_idle = True, False
            patience_s = step_limit_s + self._watchdog_s if self._lockstep else self._patience_s
            turn = self._hear(patience_s)
        except TransportTimeout:
            return self._guess(batch)
        except TransportError as error:
            self._fall_back(str(error))
            return None
        self._silent_since = None
        return turn

    def idle(self) -> None:
        """There is no work: the others need not wait. Cheap to repeat."""
        if self._is_idle or self.fallback is not None:
            return
        self._is_idle, self._is_outstanding = True, False
        try:
            self._connection.send(Kind.IDLE, self._step, b"", SEND_S)
        except TransportError as error:
            self._fall_back(str(error))

    def wait_idle(self, timeout_s: float) -> Turn | None:
        """Lockstep: the dummy step that an idle rank must run now, if one comes in time.

        Raises:
            TransportError: the gang has fallen apart.
        """
        if self.fallback is not None:
            raise TransportError(self.fallback)
        try:
            return self._hear(timeout_s)
        except TransportTimeout:
            return None
        except TransportError as error:
            self._fall_back(str(error))
            return None

    def close(self) -> None:
        """Leave. The gang falls back to the static K."""
        self._connection.close()

    def _hear(self, timeout_s: float) -> Turn | None:
        deadline = time.monotonic() + timeout_s
        while True:
            if self._early:
                frame = self._early.popleft()
            else:
                frame = self._connection.recv(max(deadline - time.monotonic(), 0.0))
            if frame.kind == Kind.FALLBACK:
                self._fall_back(frame.body.decode())
                return None
            if frame.kind == Kind.DUMMY:
                return Turn(BATCH.unpack(frame.body)[0], is_dummy=True)
            if frame.kind != Kind.ANSWER:
                raise TransportError(f"the coordinator sent frame kind {frame.kind}")
            if frame.step != self._step:
                continue  # to a report that was not waited for any longer
            if self._is_outstanding:
                self._is_outstanding = False
                self._last_batch = BATCH.unpack(frame.body)[0]
                return Turn(self._last_batch)
            if self._lockstep and self._is_idle:
                # The work went away after the report; the others count on this rank's step.
                return Turn(BATCH.unpack(frame.body)[0], is_dummy=True)

    def _guess(self, batch: int) -> Turn | None:
        """No answer in time: go on with what was decided last, unless it has been too long."""
        now = time.monotonic()
        self.num_unanswered += 1
        self._is_outstanding = False
        if self._silent_since is None:
            self._silent_since = now
        if self._lockstep or now - self._silent_since > self._watchdog_s:
            self._fall_back("the coordinator, or in lockstep a rank, is silent for too long")
            return None
        return Turn(max(batch, self._last_batch))

    def _fall_back(self, reason: str) -> None:
        logger.warning("dynamic K is off on data-parallel rank %d: %s", self.rank, reason)
        self.fallback = reason
        self._connection.close()
