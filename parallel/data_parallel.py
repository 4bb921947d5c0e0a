"""How data-parallel ranks agree on K, step by step. No Ray: rendezvous is the deployment's part.

Each rank holds one connection to a coordinator, a thread in rank 0's process. Before a step a rank
reports how many requests it will run; when every busy rank has reported, or the first of them has
waited `max_delay_s`, the round closes and all who reported get the largest number. So one small
message each way, and a rank that is slow or stuck costs the others one bounded wait: it is not
waited for again until it has reported.

A rank that is gone ends the agreement for all, for good: everyone uses the static K, as under
`dynamic_k_dp_policy: disable`, until the gang is restarted.

Where experts of the target span the ranks (`lockstep`), every rank must run as many steps as the
others: a round has no deadline, and ranks without work are told to run a dummy step in each.
Experts of a draft model stay within their replica: they would need equal numbers of draft passes
too, which K as an upper bound does not give, since a request near its end drafts less.
"""

from __future__ import annotations

import enum
import logging
import select
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass

from parallel.transport.frames import Frame, TransportError, TransportTimeout
from parallel.transport.socket import FrameSocket
from parallel.transport.tcp import TcpAddress, TcpFrameListener, TcpFrameSocket

logger = logging.getLogger(__name__)

# A wait costs a step's speed, an early close only the K of one step.
MAX_DELAY_S = 0.005
# A coordinator or, in lockstep, a rank that is silent for that long is taken for dead.
WATCHDOG_S = 30.0
_ACCEPT_S = 1.0
_SEND_S = 1.0
_BATCH = struct.Struct("<I")


class _Kind(enum.IntEnum):
    """What a frame between rank and coordinator says. 0 is the transport's hello."""

    DIGEST = 1  # rank: text, must equal the coordinator's
    REPORT = 2  # rank: requests of its next step
    IDLE = 3  # rank: no work; not waited for
    ANSWER = 4  # coordinator: the largest batch; the step of the frame is the report's
    DUMMY = 5  # coordinator, lockstep: run a dummy step; the largest batch
    FALLBACK = 6  # coordinator: text, why there is no agreement any more
    SHARE = 7  # rank 0 to the coordinator, and from there to each other rank: bytes


# --- the rule, without sockets or clock -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """A closed round. `late` were waited for in vain; `dummies` have no work (lockstep only)."""

    round: int
    batch: int
    reporters: tuple[int, ...]
    late: tuple[int, ...]
    dummies: tuple[int, ...]


@dataclass(slots=True)
class _Rank:
    batch: int = 0  # last reported; 0 when idle
    has_reported: bool = False
    is_late: bool = False


class Rounds:
    """Who has reported, when a round closes, what it decides. Time is given, never read."""

    def __init__(self, max_delay_s: float = MAX_DELAY_S, *, lockstep: bool = False) -> None:
        self._max_delay_s = max_delay_s
        self._lockstep = lockstep
        self._ranks: dict[int, _Rank] = {}
        self._opened_s: float | None = None
        self.round = 0

    def join(self, rank: int) -> None:
        self._ranks[rank] = _Rank()

    def leave(self, rank: int) -> None:
        self._ranks.pop(rank, None)

    def report(self, rank: int, batch: int, now: float) -> None:
        state = self._ranks[rank]
        state.batch, state.has_reported, state.is_late = batch, True, False
        if self._opened_s is None:
            self._opened_s = now

    def idle(self, rank: int) -> None:
        state = self._ranks[rank]
        state.batch, state.has_reported, state.is_late = 0, False, False

    @property
    def deadline(self) -> float | None:
        """When the open round closes at the latest; None without one, or in lockstep."""
        if self._opened_s is None or self._lockstep:
            return None
        return self._opened_s + self._max_delay_s

    def decide(self, now: float) -> Decision | None:
        """Close the round if every busy rank has reported, or its time is up."""
        if self._opened_s is None:
            return None
        missing = [r for r, s in self._ranks.items() if s.batch and not s.has_reported]
        waited_for = [r for r in missing if not self._ranks[r].is_late]
        deadline = self.deadline
        if waited_for and (deadline is None or now < deadline):
            return None
        for rank in waited_for:
            self._ranks[rank].is_late = True
        reporters = tuple(sorted(r for r, s in self._ranks.items() if s.has_reported))
        dummies: tuple[int, ...] = ()
        if self._lockstep:
            dummies = tuple(sorted(r for r, s in self._ranks.items() if not s.batch))
        batch = max((s.batch for s in self._ranks.values()), default=0)
        for rank in reporters:
            self._ranks[rank].has_reported = False
        self._opened_s = None
        if not reporters:
            return None  # all who had reported left or went idle
        self.round += 1
        return Decision(self.round, batch, reporters, tuple(sorted(waited_for)), dummies)


# --- the coordinator --------------------------------------------------------------------------


class Coordinator:
    """Serves `Rounds` to the ranks of one gang, in threads of its own.

    Args:
        host: Address to listen at; the other ranks' nodes must reach it.
        size: Number of ranks.
        digest: Of the configuration; a rank with another one is refused.
        max_delay_s: Longest wait for a busy rank.
        lockstep: Dummy steps for ranks without work, and no deadline.
    """

    def __init__(
        self,
        host: str,
        size: int,
        digest: str,
        max_delay_s: float = MAX_DELAY_S,
        *,
        lockstep: bool = False,
    ) -> None:
        self._size = size
        self._digest = digest
        self._listener = TcpFrameListener(host, generation=0)
        self._rounds = Rounds(max_delay_s, lockstep=lockstep)
        self._connections: dict[int, FrameSocket] = {}
        self._reports: dict[int, int] = {}  # rank -> the frame step to answer
        self._arrivals: list[tuple[int, FrameSocket]] = []
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._is_stopping = False
        self._shared: bytes | None = None
        self.num_late = 0
        self.fallback: str | None = None
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._accept, "paceline-dp-accept"), (self._serve, "paceline-dp"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> TcpAddress:
        return self._listener.address

    def close(self) -> None:
        """End the threads and all connections. Idempotent."""
        self._is_stopping = True
        self._listener.close()
        self._wake()
        for thread in self._threads:
            thread.join(2 * _ACCEPT_S)
        for connection in self._connections.values():
            connection.close()

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"x")
        except OSError:
            logger.debug("the coordinator's thread has ended")

    def _accept(self) -> None:
        while not self._is_stopping:
            try:
                connection, hello = self._listener.accept(_ACCEPT_S)
            except TransportTimeout:
                continue
            except TransportError:
                return  # the listener is closed
            try:
                frame = connection.recv(_ACCEPT_S)
            except TransportError:
                connection.close()
                continue
            theirs = frame.body.decode(errors="replace")
            refusal = self._refusal(hello.rank, frame.kind, theirs)
            if refusal:
                logger.error("data-parallel rank %d was refused: %s", hello.rank, refusal)
                self._send(connection, _Kind.FALLBACK, 0, refusal.encode())
                connection.close()
                continue
            self._send(connection, _Kind.DIGEST, 0, self._digest.encode())
            with self._lock:
                self._arrivals.append((hello.rank, connection))
            self._wake()

    def _refusal(self, rank: int, kind: int, digest: str) -> str:
        if not 0 <= rank < self._size:
            return f"rank {rank} in a gang of {self._size}"
        if kind != _Kind.DIGEST or digest != self._digest:
            return f"its configuration {digest[:12]} is not the gang's {self._digest[:12]}"
        return ""

    def _serve(self) -> None:
        try:
            while not self._is_stopping:
                self._wait()
                self._seat_arrivals()
                for rank, connection in list(self._connections.items()):
                    self._hear(rank, connection)
                decision = self._rounds.decide(time.monotonic())
                if decision is not None:
                    self._announce(decision)
        except Exception:
            logger.exception("the data-parallel coordinator failed")
            self._fall_back("the coordinator failed")
        finally:
            self._wake_read.close()
            self._wake_write.close()

    def _wait(self) -> None:
        deadline = self._rounds.deadline
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        for connection in self._connections.values():
            poller.register(connection.fileno(), select.POLLIN)
        timeout_s = 1.0 if deadline is None else max(deadline - time.monotonic(), 0.0)
        poller.poll(timeout_s * 1e3)
        try:
            self._wake_read.recv(4096)
        except BlockingIOError:
            return

    def _seat_arrivals(self) -> None:
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
        for rank, connection in arrivals:
            if rank in self._connections:
                self._lose(rank, "it joined twice")
            self._connections[rank] = connection
            self._rounds.join(rank)
            if self._shared is not None:
                self._send(connection, _Kind.SHARE, 0, self._shared)
            if self.fallback is not None:
                self._send(connection, _Kind.FALLBACK, 0, self.fallback.encode())

    def _hear(self, rank: int, connection: FrameSocket) -> None:
        try:
            while (frame := connection.try_recv()) is not None:
                if frame.kind == _Kind.REPORT:
                    self._reports[rank] = frame.step
                    self._rounds.report(rank, _BATCH.unpack(frame.body)[0], time.monotonic())
                elif frame.kind == _Kind.IDLE:
                    self._rounds.idle(rank)
                elif frame.kind == _Kind.SHARE and rank == 0:
                    self._shared = frame.body
                    for other in [r for r in self._connections if r != 0]:
                        self._tell(other, _Kind.SHARE, 0, self._shared)
                else:
                    raise TransportError(f"frame kind {frame.kind}")
        except TransportError as error:
            self._lose(rank, str(error))

    def _announce(self, decision: Decision) -> None:
        self.num_late += len(decision.late)
        body = _BATCH.pack(decision.batch)
        for rank in decision.reporters:
            self._tell(rank, _Kind.ANSWER, self._reports[rank], body)
        for rank in decision.dummies:
            self._tell(rank, _Kind.DUMMY, decision.round, body)

    def _tell(self, rank: int, kind: _Kind, step: int, body: bytes) -> None:
        connection = self._connections.get(rank)
        if connection is not None and not self._send(connection, kind, step, body):
            self._lose(rank, "it takes no messages")

    def _lose(self, rank: int, why: str) -> None:
        connection = self._connections.pop(rank, None)
        if connection is not None:
            connection.close()
        self._rounds.leave(rank)
        if not self._is_stopping:
            self._fall_back(f"data-parallel rank {rank} is gone: {why}")

    def _fall_back(self, reason: str) -> None:
        if self.fallback is None:
            logger.warning("dynamic K is off for the gang: %s", reason)
            self.fallback = reason
        for connection in self._connections.values():
            self._send(connection, _Kind.FALLBACK, 0, reason.encode())

    @staticmethod
    def _send(connection: FrameSocket, kind: _Kind, step: int, body: bytes) -> bool:
        try:
            connection.send(kind, step, body, _SEND_S)
        except TransportError:
            return False  # its end of file is seen by the reader
        return True


# --- a rank -----------------------------------------------------------------------------------


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
        watchdog_s: Silence after which it counts as dead.
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
        self._patience_s = watchdog_s if lockstep else 4 * max_delay_s
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
        self._connection.send(_Kind.DIGEST, 0, digest.encode(), _SEND_S)
        answer = self._connection.recv(timeout_s)
        if answer.kind != _Kind.DIGEST:
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
            self._connection.send(_Kind.SHARE, 0, value, _SEND_S)
            return value
        frame = self._connection.recv(timeout_s)
        if frame.kind == _Kind.FALLBACK:
            raise TransportError(frame.body.decode())
        if frame.kind != _Kind.SHARE:
            raise TransportError(f"the coordinator sent frame kind {frame.kind}")
        return frame.body

    def check(self) -> None:
        """For waits before the first turn.

        Raises:
            TransportError: the gang has fallen apart.
        """
        while (frame := self._connection.try_recv()) is not None:
            if frame.kind == _Kind.FALLBACK:
                raise TransportError(frame.body.decode())
            self._early.append(frame)

    def next_turn(self, batch: int) -> Turn | None:
        """Agree on a step of `batch` (at least 1) requests. None: no agreement, static K.

        Waits a few times `max_delay_s` at most; an answer that did not come by then is replaced
        by the last one.
        """
        if self.fallback is not None:
            return None
        try:
            if not self._is_outstanding:
                self._step += 1
                self._connection.send(_Kind.REPORT, self._step, _BATCH.pack(batch), _SEND_S)
                self._is_outstanding, self._is_idle = True, False
            turn = self._hear(self._patience_s)
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
            self._connection.send(_Kind.IDLE, self._step, b"", _SEND_S)
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
            if frame.kind == _Kind.FALLBACK:
                self._fall_back(frame.body.decode())
                return None
            if frame.kind == _Kind.DUMMY:
                return Turn(_BATCH.unpack(frame.body)[0], is_dummy=True)
            if frame.kind != _Kind.ANSWER:
                raise TransportError(f"the coordinator sent frame kind {frame.kind}")
            if frame.step != self._step:
                continue  # to a report that was not waited for any longer
            if self._is_outstanding:
                self._is_outstanding = False
                self._last_batch = _BATCH.unpack(frame.body)[0]
                return Turn(self._last_batch)
            if self._lockstep and self._is_idle:
                # The work went away after the report; the others count on this rank's step.
                return Turn(_BATCH.unpack(frame.body)[0], is_dummy=True)

    def _guess(self, batch: int) -> Turn | None:
        """No answer in time: go on with what was decided last, unless it has been too long."""
        now = time.monotonic()
        self.num_unanswered += 1
        self._is_outstanding = False
        if self._silent_since is None:
            self._silent_since = now
        if self._lockstep or now - self._silent_since > self._watchdog_s:
            self._fall_back(f"the coordinator is silent for {self._watchdog_s:g} s")
            return None
        return Turn(max(batch, self._last_batch))

    def _fall_back(self, reason: str) -> None:
        logger.warning("dynamic K is off on data-parallel rank %d: %s", self.rank, reason)
        self.fallback = reason
        self._connection.close()
