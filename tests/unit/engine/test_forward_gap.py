"""The time between two forwards of the target: what makes it longer, and what is no part of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
import torch

from actors.model.forward_clock import ForwardClock
from actors.requests import GenerateRequest, RunOutput
from actors.startup.in_process import build_in_process
from actors.steps.client import InProcessStepClient
from actors.steps.messages import RowStats, Stat, StepPlan, token_array
from actors.steps.protocols import Verified
from actors.steps.target_step import TargetStep
from actors.verifier.calibration import Calibration
from actors.verifier.engine import VerifierEngine
from actors.verifier.goodput import Goodput
from specconfig import EngineArgs
from tests.tiny import write_tiny_model
from tests.unit.engine import fakes

NUM_TOKENS = 5
SLOW_S = 0.05


def slowed(call: Callable, seconds: float) -> Callable:
    def slow(*args, **kwargs):
        time.sleep(seconds)
        return call(*args, **kwargs)

    return slow


def generate(engine: VerifierEngine, name: str) -> None:
    done = threading.Event()

    def sink(run: RunOutput) -> None:
        if run.finish_reason is not None:
            done.set()

    request = GenerateRequest(name, (5, 6, 7), max_tokens=NUM_TOKENS, ignore_eos=True)
    engine.add_request(request, sink)
    assert done.wait(30)


class Gaps:
    """What is observed of an engine's gaps from now on."""

    def __init__(self, engine: VerifierEngine) -> None:
        self._seen = engine.stats.forward_gap_s
        self._count, self._sum = self._seen.count, self._seen.sum

    @property
    def count(self) -> int:
        return self._seen.count - self._count

    @property
    def mean_s(self) -> float:
        return (self._seen.sum - self._sum) / self.count


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    model: Path = write_tiny_model(tmp_path_factory.mktemp("model"))
    args = EngineArgs(
        model=str(model), device="cpu", dtype="float32", max_model_len=64, max_num_seqs=2,
        compile_layers="off",
    )  # fmt: skip
    built = build_in_process(args.resolve())
    yield built
    built.stop()


@pytest.mark.parametrize("slow", ["plan", "take", "forward", "idle"])
def test_what_the_gap_is_made_of(engine, monkeypatch, slow):
    loop, host = engine._loop, engine._client._step._target.host
    if slow == "plan":
        monkeypatch.setattr(loop.scheduler, "schedule", slowed(loop.scheduler.schedule, SLOW_S))
    elif slow == "take":
        monkeypatch.setattr(loop, "_take", slowed(loop._take, SLOW_S))
    elif slow == "forward":
        monkeypatch.setattr(host.model, "forward", slowed(host.model.forward, SLOW_S))
    gaps = Gaps(engine)
    generate(engine, "first")
    if slow == "idle":
        time.sleep(10 * SLOW_S)
    generate(engine, "second")
    # The first forward behind idle time counts for nothing.
    assert gaps.count == 2 * (NUM_TOKENS - 1)
    assert (gaps.mean_s >= SLOW_S) == (slow in ("plan", "take"))


class Target:
    """Whose forwards are 50 ms apart."""

    def run(self, plan, proposal, masks=None):
        columns = {Stat.SAMPLED: token_array([])}
        return Verified(RowStats(plan.step, token_array([]), columns, gap_ms=50.0))


class SlowDrafts:
    """Drafts before the forward and learns from it after."""

    def propose(self, plan):
        time.sleep(0.01)
        return None, None

    def absorb(self, plan, verified):
        time.sleep(0.02)


def test_drafting_in_between_is_no_part_of_it():
    step = TargetStep(Target(), SlowDrafts())
    first, second = (step.run(StepPlan(0, i)).gap_ms for i in (1, 2))
    assert 20.0 < first <= 40.0
    # The drafter took the states of the forward before, too.
    assert second <= 20.0
    assert TargetStep(Target()).run(StepPlan(0, 1)).gap_ms == pytest.approx(50.0, abs=5.0)


@pytest.mark.parametrize("gap_ms", [0.5, None])
def test_it_travels_with_the_result(gap_ms):
    columns = {Stat.SAMPLED: token_array([7])}
    sent = RowStats(3, token_array([1]), columns, None, None, 2.0, 1.0, gap_ms)
    got = RowStats.unpack(sent.pack())
    assert (got.forward_ms, got.draft_ms, got.gap_ms) == (2.0, 1.0, gap_ms)


class Noting(InProcessStepClient):
    """Notes when a plan leaves and when its result is there."""

    def __init__(self, target, notes):
        super().__init__(target)
        self.notes = notes

    def send(self, plan):
        self.notes.append("plan")
        super().send(plan)

    def recv(self, timeout_s, mask_source=None):
        result = super().recv(timeout_s, mask_source)
        self.notes.append("result")
        return result


def test_the_next_plan_waits_for_nobody_who_counts_learns_or_reads(monkeypatch):
    notes, script = [], fakes.whole()
    learn = Goodput.observe_run
    monkeypatch.setattr(Goodput, "observe_run", lambda *args: (notes.append("learn"), learn(*args)))
    monkeypatch.setattr(Calibration, "next_rows", lambda self: None)
    limits = fakes.make_limits(3, follows_goodput=True)
    client = Noting(fakes.ScriptedTarget(limits, script), notes)
    engine = VerifierEngine(limits, client, drafter=fakes.FakeLookup(fakes.mixed(script)))
    done, seen = threading.Event(), []

    def sink(run):
        seen.append((engine.stats.num_output_tokens, run.num_output_tokens))
        notes.append("read")
        if run.finish_reason is not None:
            done.set()

    engine.add_request(fakes.request("a", [1, 2, 3], max_tokens=30, ignore_eos=True), sink)
    assert done.wait(10)
    engine.stop()
    order = [note for note, _ in groupby(notes)]
    first = order.index("learn") - 2  # of a prompt nothing is learnt
    assert order[first : first + 8] == ["result", "plan", "learn", "read"] * 2
    # Whoever reads a run finds it counted.
    assert all(counted == emitted for counted, emitted in seen)


class Event:
    """A CUDA event of a stream: work is put in at `now`, and has been done up to `reached`."""

    now = reached = 0.0

    def __init__(self, *, enable_timing):
        assert enable_timing
        self.at = None

    def record(self):
        self.at = Event.now

    def query(self):
        return self.at <= Event.reached

    def elapsed_time(self, end):
        return end.at - self.at


def test_on_cuda_it_is_what_the_stream_says(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = ForwardClock(torch.device("cuda"))
    Event.now = 10.0
    clock.begin()
    assert clock.gap_ms() is None  # the first
    Event.now = 15.0
    clock.end()
    Event.now, Event.reached = 17.5, 16.0
    clock.begin()
    clock.end()
    assert clock.gap_ms() is None  # the stream is not there yet
    Event.reached = 20.0
    assert clock.gap_ms() == 2.5
