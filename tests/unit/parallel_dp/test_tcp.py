"""Frames over TCP: whole, prompt, and only from those who know the secret."""

import os
import socket
import threading
import time

import numpy as np
import pytest

from actors.errors import WorkerLost
from actors.steps.client import SocketStepClient
from actors.steps.messages import FrameKind, StepPlan, TargetEntry, token_array
from actors.steps.serve import serve_target
from actors.steps.target_step import TargetStep
from parallel.transport.frames import (
    HEADER,
    MAGIC,
    ConnectionLost,
    TransportError,
    TransportTimeout,
)
from parallel.transport.relay import Relay
from parallel.transport.socket import FrameListener, FrameSocket, SocketDir, wait_any
from parallel.transport.tcp import TcpFrameListener, TcpFrameSocket
from tests.unit.parallel_dp.test_gang import CountingTarget


@pytest.fixture
def listener():
    made = TcpFrameListener("127.0.0.1", 3)
    yield made
    made.close()


def dial(listener, **kw):
    args = {"role": "target", "rank": 2, "generation": 3, "pid": os.getpid(), "timeout_s": 5.0}
    return TcpFrameSocket.dial(listener.address, **{**args, **kw})


def pair(listener):
    accepted = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept(5)))
    thread.start()
    theirs = dial(listener)
    thread.join()
    (ours, hello) = accepted[0]
    return ours, theirs, hello


def test_hello_and_any_body_size(listener) -> None:
    ours, theirs, hello = pair(listener)
    assert hello == ("target", 2, 3, os.getpid())
    for size in (0, 1, 65_536, 3_000_000):
        body = np.random.default_rng(size).bytes(size)
        sender = threading.Thread(target=theirs.send, args=(7, size, body, 5.0))
        sender.start()
        frame = ours.recv(5.0)
        sender.join()
        assert (frame.kind, frame.step, frame.body) == (7, size, body)


def test_frames_that_arrive_together_are_all_seen_by_wait_any(listener) -> None:
    ours, theirs, _ = pair(listener)
    for step in range(50):
        theirs.send(1, step, b"x" * step, 1.0)
    for step in range(50):
        assert wait_any([ours], 2.0) == [ours]
        frame = ours.try_recv()
        assert frame is not None and frame.step == step
    assert ours.try_recv() is None


def test_nothing_is_delayed(listener) -> None:
    ours, theirs, _ = pair(listener)
    assert theirs._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert ours._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_closed_peer_is_end_of_file_and_older_generations_are_dropped(listener) -> None:
    ours, theirs, _ = pair(listener)
    theirs.generation = 2
    theirs.send(1, 0, b"old", 1.0)
    theirs.generation = 3
    theirs.send(1, 1, b"new", 1.0)
    assert ours.recv(2.0).body == b"new"
    theirs.close()
    started = time.monotonic()
    with pytest.raises(ConnectionLost):
        ours.recv(5.0)
    assert time.monotonic() - started < 1


def test_a_reader_that_does_not_read_times_the_sender_out(listener) -> None:
    _ours, theirs, _ = pair(listener)
    with pytest.raises(TransportTimeout):
        theirs.send(1, 0, bytes(100_000_000), 0.3)
    assert not theirs.is_open, "half a frame is out: nothing sensible can follow"


@pytest.mark.parametrize("talk", [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(64), "length", "hello"])
def test_strangers_do_not_get_in_and_do_not_keep_others_out(listener, talk) -> None:
    stranger = socket.create_connection(listener.address[:2])
    if talk == "length":
        talk = HEADER.pack(MAGIC, 3, 0, 0, 0, 1 << 40)
    elif talk == "hello":
        talk = HEADER.pack(MAGIC, 3, 0, 0, 0, 72) + bytes(72)
    stranger.sendall(talk)
    ours, _theirs, hello = pair(listener)
    assert hello.role == "target" and ours.is_open
    assert listener.num_refused == 1
    stranger.close()


def test_a_wrong_secret_is_refused_on_both_sides(listener) -> None:

    def wait() -> None:
        with pytest.raises(TransportTimeout):
            listener.accept(1.0)

    thread = threading.Thread(target=wait)
    thread.start()
    with pytest.raises(TransportError):
        TcpFrameSocket.dial(listener.address._replace(secret=b"no"), "target", 0, 3, 1, 3.0)
    thread.join()
    assert listener.num_refused == 1


# --- the relay --------------------------------------------------------------------------------


@pytest.fixture
def relay():
    made = Relay("127.0.0.1")
    yield made
    made.close()


class Node:
    """Worker threads behind a relay, as on another node."""

    def __init__(self, relay, listener, ranks):
        self.path = relay.open("target", len(ranks), listener.address, 3)
        self.targets = {rank: CountingTarget() for rank in ranks}
        self.connections = {}
        self.threads = [threading.Thread(target=self.work, args=(rank,)) for rank in ranks]
        for thread in self.threads:
            thread.start()

    def work(self, rank):
        connection = FrameSocket.connect(self.path, "target", rank, 3, os.getpid(), 5.0)
        self.connections[rank] = connection
        serve_target(connection, TargetStep(self.targets[rank]), answers=rank == 0)
        connection.close()


def plan(step):
    return StepPlan(3, step, target=(TargetEntry(0, 0, token_array([5]), 0, 0, 1),))


def test_a_plan_crosses_once_per_node_and_reaches_every_rank(relay, listener) -> None:
    node = Node(relay, listener, [0, 1, 2])
    uplink, hello = listener.accept(5.0)
    assert (hello.role, hello.rank) == ("target", 0)
    client = SocketStepClient([uplink])
    for step in range(1, 30):
        client.send(plan(step))
        assert client.recv(5.0).step == step
    client.close()
    for thread in node.threads:
        thread.join(5)
        assert not thread.is_alive(), "stop reaches every worker"
    assert {t.num_forwards for t in node.targets.values()} == {29}


def test_a_worker_that_dies_is_a_lost_worker_for_the_verifier(relay, listener) -> None:
    node = Node(relay, listener, [0, 1])
    uplink, _ = listener.accept(5.0)
    client = SocketStepClient([uplink])
    client.send(plan(1))
    client.recv(5.0)
    node.connections[1]._sock.shutdown(socket.SHUT_RDWR)  # what the end of a process does
    started = time.monotonic()
    with pytest.raises(WorkerLost):
        for step in range(2, 100):
            client.send(plan(step))
            client.recv(5.0)
    assert time.monotonic() - started < 2
    node.threads[0].join(5)
    assert not node.threads[0].is_alive(), "the other worker ends too"


def test_drafts_reach_a_target_on_another_node_also_those_of_a_new_generation(relay) -> None:
    other = Relay("127.0.0.1")
    sockets = SocketDir()
    target = FrameListener(sockets.socket_path("drafts"), 3)
    path = other.reach(relay.export(target.path))
    for attempt in range(2):
        target.generation = 3 + attempt
        draft = FrameSocket.connect(path, "draft", 0, 3 + attempt, os.getpid(), 5.0)
        ours, hello = target.accept(5.0)
        assert hello[:3] == ("draft", 0, 3 + attempt)
        draft.send(FrameKind.DRAFTS, attempt, b"abc", 1.0)
        assert ours.recv(5.0).body == b"abc"
        draft.close()
        with pytest.raises(ConnectionLost):
            ours.recv(5.0)
    target.close()
    other.close()
    sockets.close()
