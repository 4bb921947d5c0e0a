"""The socket transport and the steps over it, with real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from actors.errors import EngineDead, StepTimeout, WorkerLost
from actors.steps.client import InProcessStepClient, SocketStepClient
from actors.steps.drafts import ConnectedDrafts
from actors.steps.messages import (
    DraftEntry,
    DraftTokens,
    FrameKind,
    RowMasks,
    RowStats,
    Stat,
    StepPlan,
    TargetEntry,
    token_array,
)
from actors.steps.patience import StepPatience
from actors.steps.protocols import Proposal, Verified
from actors.steps.serve import serve_draft, serve_target
from actors.steps.target_step import TargetStep
from actors.verifier.engine import VerifierEngine
from parallel.transport.frames import (
    MAX_BODY_BYTES,
    ConnectionLost,
    FrameAssembler,
    TransportError,
    TransportTimeout,
    packets,
)
from parallel.transport.relay import Relay
from parallel.transport.socket import FrameListener, FrameSocket, SocketDir
from parallel.transport.tcp import TcpFrameListener
from tests.unit.engine import fakes

ROOT = Path(__file__).parents[3]
K = 3


@pytest.fixture
def sockets():
    directory = SocketDir()
    yield directory
    directory.close()
    assert not directory.path.exists()


def pair(sockets, generation=0, peer_generation=None):
    listener = FrameListener(sockets.socket_path("s"), generation)
    theirs = FrameSocket.connect(
        listener.path, "target", 2, peer_generation or generation, os.getpid(), 2.0
    )
    ours, hello = listener.accept(2.0)
    listener.close()
    return ours, theirs, hello


def test_hello_names_role_and_rank(sockets):
    ours, theirs, hello = pair(sockets)
    assert hello == ("target", 2, 0, os.getpid())
    ours.close()
    theirs.close()


@pytest.mark.parametrize("size", [0, 1, MAX_BODY_BYTES, MAX_BODY_BYTES + 1, 5_000_000])
def test_any_body_size_arrives_whole(sockets, size):
    ours, theirs, _ = pair(sockets)
    body = np.random.default_rng(size).bytes(size)
    sender = threading.Thread(target=theirs.send, args=(7, 3, body, 5.0))
    sender.start()
    frame = ours.recv(5.0)
    sender.join()
    assert (frame.kind, frame.step, frame.body) == (7, 3, body)
    ours.close()
    theirs.close()


def test_late_frames_of_an_older_generation_are_dropped(sockets):
    ours, theirs, _ = pair(sockets, generation=4)
    theirs.generation = 3
    theirs.send(1, 1, b"old", 5.0)
    theirs.generation = 4
    theirs.send(1, 2, b"new", 5.0)
    assert ours.recv(2.0).body == b"new"
    theirs.generation = 5
    theirs.send(1, 3, b"newer", 5.0)
    with pytest.raises(TransportError, match="generation 5"):
        ours.recv(2.0)
    ours.close()
    theirs.close()


def test_deadlines_and_end_of_file(sockets):
    ours, theirs, _ = pair(sockets)
    started = time.monotonic()
    with pytest.raises(TransportTimeout):
        ours.recv(0.05)
    with pytest.raises(TransportTimeout):  # nobody reads: the buffer fills
        while True:
            theirs.send(1, 1, b"x" * MAX_BODY_BYTES, 0.05)
    assert time.monotonic() - started < 2.0
    theirs.close()
    with pytest.raises(ConnectionLost):
        while True:
            ours.recv(1.0)
    with pytest.raises(ConnectionLost):
        ours.send(1, 1, b"", 0.1)
    ours.close()
    with pytest.raises(ConnectionLost):
        ours.recv(0.1)


def test_a_frame_cut_by_the_deadline_ends_the_connection(sockets):
    """What follows half a body would be taken for the rest of it."""
    ours, theirs, _ = pair(sockets)
    with pytest.raises(TransportTimeout):  # nobody reads: some of its packets fit, not all
        theirs.send(1, 1, b"x" * 5_000_000, 0.05)
    assert not theirs.is_open
    with pytest.raises(ConnectionLost):
        theirs.send(1, 2, b"", 0.05)
    with pytest.raises(ConnectionLost):
        ours.recv(1.0)
    ours.close()


def test_foreign_and_broken_packets_are_refused():
    with pytest.raises(TransportError, match="magic"):
        FrameAssembler().feed(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    with pytest.raises(TransportError, match="header"):
        FrameAssembler().feed(b"x")
    first, second = packets(1, 1, 0, b"x" * (MAX_BODY_BYTES + 1))
    with pytest.raises(TransportError, match="missing"):
        FrameAssembler().feed(second)
    assembler = FrameAssembler()
    assert assembler.feed(first) is None
    with pytest.raises(TransportError, match="missing"):
        assembler.feed(first)


def test_nobody_listens_and_nobody_connects(sockets):
    with pytest.raises(TransportTimeout, match="nobody listens"):
        FrameSocket.connect(sockets.socket_path("none"), "draft", 0, 0, 1, 0.1)
    listener = FrameListener(sockets.socket_path("s"), 0)
    with pytest.raises(TransportTimeout, match="nobody connected"):
        listener.accept(0.05)
    listener.close()
    assert not Path(listener.path).exists()
    with pytest.raises(ValueError, match="longer"):
        sockets.socket_path("x" * 100)


# --- worker processes -------------------------------------------------------------------------


def limits():
    return fakes.make_limits(K, has_draft_model=True)


def worker_main(role: str, verifier_path: str, link_path: str, trouble: str) -> None:
    """A target or draft process. Runs in a subprocess of this file."""
    script = fakes.whole()
    lims = limits()
    if role == "target":
        # Listening before the verifier hears of this process, so before anyone drafts.
        link = FrameListener(link_path, 0)
        verifier = FrameSocket.connect(verifier_path, role, 0, 0, os.getpid(), 10.0)
        drafts = ConnectedDrafts(link)
        target = fakes.ScriptedTarget(lims, script)
        if trouble == "target_raises":
            target.fail_at = 5
        if trouble == "target_hangs":
            target.run = _sleepy(target.run)
        serve_target(verifier, TargetStep(target, drafts))
    else:
        host = fakes.FakeDraftHost(lims, fakes.mixed(script))
        if trouble == "draft_raises":
            host.fail_at = 5
        if trouble == "draft_hangs":
            host.propose = _sleepy(host.propose)
        generation = int(trouble or 0) if trouble.isdigit() else 0
        verifier = FrameSocket.connect(verifier_path, role, 0, generation, os.getpid(), 10.0)
        link_socket = FrameSocket.connect(link_path, role, 0, generation, os.getpid(), 10.0)
        serve_draft(verifier, host, link_socket)


def _sleepy(run):
    def slow(plan, *args):
        if plan.step == 5:
            time.sleep(60)
        return run(plan, *args)

    return slow


def start_worker(role, *args):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.unit.engine.test_sockets", role, *args],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )


class Group:
    def __init__(self, sockets, trouble=""):
        listener = FrameListener(sockets.socket_path("v"), 0)
        self.sockets = sockets
        self.link = sockets.socket_path("d")
        self.processes = {
            role: start_worker(role, listener.path, self.link, trouble)
            for role in ("target", "draft")
        }
        connections = {}
        for _ in range(2):
            connection, hello = listener.accept(20.0)
            connections[hello.role] = connection
        listener.close()
        self.client = SocketStepClient([connections["target"]], [connections["draft"]])

    def rebuild_draft(self, generation):
        """A new draft process in place of a dead one; how to change over to it."""
        listener = FrameListener(self.sockets.socket_path(f"v{generation}"), generation)
        self.processes["draft"].wait(5.0)
        self.processes["draft"] = start_worker("draft", listener.path, self.link, str(generation))
        connection, _ = listener.accept(20.0)
        listener.close()
        return lambda: self.client.replace_drafts([connection])

    def kill(self, role):
        self.processes[role].send_signal(signal.SIGKILL)

    def close(self):
        self.client.close()
        for process in self.processes.values():
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def start(sockets):
    groups = []

    def make(trouble=""):
        groups.append(Group(sockets, trouble))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def test_steps_over_sockets_equal_plain_decoding(start):
    group = start()
    engine = VerifierEngine(limits(), group.client)
    prompts = [[1, 2, 3], [4] * 20, [5, 6]]
    got = fakes.run_all(
        engine, [fakes.request(str(i), p, max_tokens=60) for i, p in enumerate(prompts)]
    )
    for prompt, out in zip(prompts, got, strict=True):
        assert out.token_ids == fakes.plain(fakes.whole(), prompt, 60)
    assert engine.stats.num_accepted_tokens > 0
    engine.stop()
    for process in group.processes.values():
        assert process.wait(5.0) == 0


@pytest.mark.parametrize("trouble", ["killed", "draft_raises", "draft_hangs"])
def test_a_lost_draft_costs_speed_only_and_its_successor_is_told_from_leftovers(start, trouble):
    group = start(trouble)
    patience = StepPatience(2.0 if trouble == "draft_hangs" else None)
    engine = VerifierEngine(limits(), group.client, patience=patience)
    prompt = [1, 2, 3]
    if trouble == "killed":
        fakes.run_all(engine, [fakes.request("first", prompt)])
        group.kill("draft")
    got = fakes.run_all(engine, [fakes.request("a", prompt, max_tokens=60)])
    assert got[0].token_ids == fakes.plain(fakes.whole(), prompt, 60)
    status = engine.status()
    assert status.is_healthy and status.draft_lost and engine.stats.num_draft_losses == 1
    (later,) = fakes.run_all(engine, [fakes.request("b", prompt, max_tokens=60)])
    assert later.token_ids == got[0].token_ids
    assert later.last.speculation.num_drafts == 0
    if trouble != "draft_hangs":
        # One that died while it was being rebuilt has left its connection to the target behind.
        FrameSocket.connect(group.link, "draft", 0, 1, os.getpid(), 5.0)
        engine.restore_draft(group.rebuild_draft(2), 2).result(20)
        (healed,) = fakes.run_all(engine, [fakes.request("c", prompt, max_tokens=60)])
        assert healed.token_ids == got[0].token_ids
        assert healed.last.speculation.num_accepted_tokens > 0
        assert engine.status().draft_lost is None and engine.stats.num_draft_losses == 1
    engine.stop()
    group.kill("draft")


def test_a_killed_target_ends_requests_quickly(start):
    group = start()
    engine = VerifierEngine(limits(), group.client)
    first_run, over = threading.Event(), threading.Event()
    outs = []

    def sink(out):
        outs.append(out)
        first_run.set()
        if out.finish_reason is not None:
            over.set()
        time.sleep(0.02)  # slow enough to be in the middle when the kill comes

    engine.add_request(fakes.request("a", [1, 2, 3], max_tokens=120), sink)
    assert first_run.wait(10)
    group.kill("target")
    started = time.monotonic()
    assert over.wait(5)
    assert time.monotonic() - started < 3.0  # 10 ms on an idle machine
    assert outs[-1].error is not None and "WorkerLost" in outs[-1].error
    assert not engine.status().is_healthy
    with pytest.raises(EngineDead, match="WorkerLost"):
        engine.add_request(fakes.request("b", [1]), outs.append)
    engine.stop()


@pytest.mark.parametrize(
    ("trouble", "error"), [("target_raises", "the target broke"), ("target_hangs", "StepTimeout")]
)
def test_a_failing_target_ends_requests(start, trouble, error):
    group = start(trouble)
    engine = VerifierEngine(limits(), group.client, patience=StepPatience(1.0))
    (got,) = fakes.run_all(engine, [fakes.request("a", [1, 2, 3], max_tokens=60)])
    assert error in got.last.error and got.last.finish_reason == "abort"
    assert not engine.status().is_healthy
    engine.stop()
    if trouble == "target_hangs":
        group.kill("target")


def test_client_errors_without_an_engine(sockets):
    ours, theirs, _ = pair(sockets)
    client = SocketStepClient([ours])
    plan = StepPlan(0, 1, target=(TargetEntry(0, 0, token_array([1]), 0, 0, 1),))
    client.send(plan)
    assert theirs.recv(1.0).kind == FrameKind.PLAN
    with pytest.raises(StepTimeout):
        client.recv(0.05)
    client.send(plan)
    theirs.close()
    with pytest.raises(WorkerLost):
        client.recv(1.0)
    client.close()
    client.close()


class OneDraft:
    """Drafts token 3 for its only entry, and is gone in step 2. Ranks are not in step."""

    def propose(self, plan):
        if plan.step == 2:
            return None, "gone"
        return Proposal(DraftTokens(plan.step, token_array([3]), token_array([1]))), None

    def absorb(self, plan, verified):
        return

    def close(self):
        return


class Masked:
    """A target that keeps what it was given, and has nothing to say."""

    def __init__(self):
        self.given = []

    def run(self, plan, proposal, masks=None):
        self.given.append((proposal.tokens.counts.tolist(), masks.rows.tolist(), masks.bits))
        stats = RowStats(plan.step, token_array([1]), {Stat.SAMPLED: token_array([7])})
        return Verified(stats)


@pytest.mark.parametrize("over", ["sockets", "relayed sockets", "this process"])
def test_drafts_go_to_the_verifier_and_masks_come_back_before_the_forward(sockets, over):
    """A two-phase step, on two ranks where there are sockets; then one whose drafts were lost."""
    targets, source, threads, closing = [Masked(), Masked()], OneDraft(), [], []
    if over == "this process":
        targets.pop()
        client = InProcessStepClient(targets[0])
        client._step = TargetStep(targets[0], source)
    else:
        gate = FrameListener(sockets.socket_path("v"), 0)
        path, num = gate.path, 2
        if over == "relayed sockets":
            relay = Relay("127.0.0.1")
            far = TcpFrameListener("127.0.0.1", 0)
            path, num = relay.open("target", 2, far.address, 0), 1
            gate, closing = far, [relay.close, far.close, gate.close]

        def work(rank, target):
            connection = FrameSocket.connect(path, "target", rank, 0, os.getpid(), 5.0)
            serve_target(connection, TargetStep(target, source), answers=rank == 0)
            connection.close()

        threads = [
            threading.Thread(target=work, args=item, daemon=True) for item in enumerate(targets)
        ]
        for thread in threads:
            thread.start()
        accepted = sorted([gate.accept(5.0) for _ in range(num)], key=lambda item: item[1].rank)
        client = SocketStepClient([connection for connection, _ in accepted])
        closing.append(gate.close)
    asked = []

    def mask_source(plan, drafts):
        asked.append(None if drafts is None else drafts.token_ids.tolist())
        return RowMasks(token_array([0]), np.full((1, 2), plan.step, dtype=np.uint32))

    entry = DraftEntry(0, 0, 1, 0, token_array([1]), 1)
    for step, is_lost in ((1, False), (2, True)):
        plan = StepPlan(
            0, step, target=(TargetEntry(0, 0, token_array([1]), 0, 1, 2),), draft=(entry,),
            awaits_masks=True,
        )  # fmt: skip
        client.send(plan)
        result = client.recv(5.0, mask_source)
        assert (result.drafts is None) == (result.draft_lost is not None) == is_lost
    assert asked == [[3], None]
    client.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    for target in targets:
        assert [given[:2] for given in target.given] == [([1], [0]), ([0], [0])]
        assert [given[2].tolist() for given in target.given] == [[[1, 1]], [[2, 2]]]
    for close in closing:
        close()


def test_a_verifier_that_ends_between_the_phases_ends_the_loop(sockets):
    ours, theirs, _ = pair(sockets)
    target = Masked()
    thread = threading.Thread(target=serve_target, args=(theirs, TargetStep(target)), daemon=True)
    thread.start()
    client = SocketStepClient([ours])
    plan = StepPlan(0, 1, target=(TargetEntry(0, 0, token_array([1]), 0, 0, 1),), awaits_masks=True)
    client.send(plan)
    assert ours.recv(5.0).kind == FrameKind.DRAFTS
    client.close()
    thread.join(5)
    assert not thread.is_alive() and not target.given
    theirs.close()


def test_no_file_descriptor_leaks(sockets):
    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    for _ in range(5):
        ours, theirs, _ = pair(sockets)
        client = SocketStepClient([ours])
        client.close()
        with pytest.raises(ConnectionLost):
            while theirs.recv(1.0).kind == FrameKind.STOP:
                pass
        theirs.close()
        with pytest.raises(TransportTimeout):
            FrameSocket.connect(sockets.socket_path("none"), "draft", 0, 0, 1, 0.01)
    assert count() == before


if __name__ == "__main__":
    worker_main(*sys.argv[1:])
