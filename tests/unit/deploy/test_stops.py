"""Signals of the command: when they are noted, when they interrupt, when they end at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import private_ray, stops
from deploy.errors import UserError
from deploy.private_ray import PrivateRay, ray_cluster
from deploy.stops import Stops
from parallel.owned_dir import OwnedDir, remove_ownerless


@pytest.fixture
def wanted() -> Iterator[Stops]:
    with Stops() as one:
        yield one


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_interrupts_where_somebody_asks(
    wanted: Stops, signum: signal.Signals
) -> None:
    os.kill(os.getpid(), signum)
    assert wanted.code == 128 + signum
    for ask in (wanted.check, lambda: wanted.sleep(60), wanted.open().__enter__):
        with pytest.raises(KeyboardInterrupt):
            ask()
    wanted.wait()


def test_open_work_is_interrupted_at_once_and_only_once(wanted: Stops) -> None:
    with pytest.raises(KeyboardInterrupt), wanted.open():
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("not interrupted")
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_clean_up_is_not_interrupted(wanted: Stops, capfd: pytest.CaptureFixture[str]) -> None:
    with wanted.ending():
        os.kill(os.getpid(), signal.SIGTERM)
    assert "Shutting down already" in capfd.readouterr().out


def test_a_second_signal_a_while_later_ends_at_once(
    wanted: Stops, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []
    monkeypatch.setattr(stops.os, "_exit", ended.append)
    wanted.end_at_once = lambda: ended.append("killed")
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [], "a signal to the process and then to its group is one"
    monkeypatch.setattr(stops, "_SAME_WISH_S", 0.0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended == ["killed", 143]


def test_handlers_come_back_and_other_threads_need_none() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stops() as wanted:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wanted.install()
        assert signal.getsignal(signal.SIGTERM) == wanted._on_signal
    assert signal.getsignal(signal.SIGTERM) == before
    thread = threading.Thread(target=Stops().__enter__)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before


class FakeRay:
    """`ray.init` starts a process that names its folder, as Ray's do, and one that does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        import ray

        monkeypatch.setenv("PYTHONPATH", "")
        monkeypatch.setattr(private_ray, "_short_temp", lambda: str(folder))
        monkeypatch.setattr(ray, "init", self.init)
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        self.failures: list[Exception] = []
        self.during: list[signal.Signals] = []
        self.theirs: list[subprocess.Popen[bytes]] = []
        self.bystander = self._begin()

    def init(self, _temp_dir: str, **_: object) -> None:
        self.theirs.append(self._begin(_temp_dir))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        for number in self.during:
            os.kill(os.getpid(), number)
        if self.failures:
            raise self.failures.pop()

    @staticmethod
    def _begin(*arguments: str) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-c", "input()", *arguments]
        return subprocess.Popen(program, stdin=subprocess.PIPE)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeRay]:
    monkeypatch.setattr(private_ray, "_END_S", 0.1)
    fake = FakeRay(monkeypatch, tmp_path)
    yield fake
    assert fake.bystander.poll() is None, "no child of ours, and ended"
    fake.bystander.communicate(b"\n")
    assert all(process.poll() is not None for process in fake.theirs)
    assert list(tmp_path.iterdir()) == []


def test_only_what_the_private_ray_started_is_ended(fake_ray: FakeRay, wanted: Stops) -> None:
    with ray_cluster(None, lambda line: None, wanted):
        assert [p.pid for p in PrivateRay.processes(_private(wanted))] == [fake_ray.theirs[0].pid]
        assert signal.getsignal(signal.SIGTERM) == wanted._on_signal


def _private(wanted: Stops) -> PrivateRay:
    private: PrivateRay = wanted.end_at_once.__self__  # type: ignore[attr-defined]
    return private


def test_a_signal_while_ray_starts_ends_what_it_has_started(
    fake_ray: FakeRay, wanted: Stops
) -> None:
    fake_ray.during = [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt), ray_cluster(None, lambda line: None, wanted):
        raise AssertionError("it was not wanted any more")
    assert wanted.code == 130


def test_ending_at_once_ends_all_too(fake_ray: FakeRay, wanted: Stops) -> None:
    with ray_cluster(None, lambda line: None, wanted):
        wanted.end_at_once()
        assert fake_ray.theirs[0].poll() is not None


def test_a_slow_start_is_tried_once_more(fake_ray: FakeRay) -> None:
    fake_ray.failures = [Exception("The current node timed out\nduring startup")]
    said: list[str] = []
    with ray_cluster(None, said.append, Stops()):
        assert fake_ray.theirs[0].poll() is not None and fake_ray.theirs[1].poll() is None
    assert (
        said[1] == "Ray did not start (The current node timed out during startup); trying once more"
    )


def test_a_second_failure_is_one_line(fake_ray: FakeRay) -> None:
    fake_ray.failures = [Exception("timed out")] * 2
    refused = pytest.raises(UserError, match=r"timed out; free .* --address")
    with refused, ray_cluster(None, lambda line: None, Stops()):
        pass


CRASH = """
import os, sys
from parallel.owned_dir import OwnedDir
print(OwnedDir("x-", sys.argv[1]).path)
sys.stdout.flush()
os._exit(9)
"""


def test_folders_of_dead_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    program = [sys.executable, "-c", CRASH, str(tmp_path)]
    out = subprocess.run(program, capture_output=True, text=True, check=False).stdout
    dead = Path(out.strip())
    assert dead.is_dir()
    mine, foreign = OwnedDir("x-", str(tmp_path)), tmp_path / "x-foreign"
    foreign.mkdir()
    remove_ownerless("x-", str(tmp_path))
    assert not dead.exists() and mine.path.is_dir() and foreign.is_dir()
    mine.close()
    mine.close()
    assert not mine.path.exists()
