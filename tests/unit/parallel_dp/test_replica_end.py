"""How a replica ends, with everything that it started replaced by what notes its end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from actors.startup import launch
from actors.startup.draft_watch import DraftWatch
from actors.startup.launch import Replica


class Noted:
    """Any part of a replica: notes each call by its name, and fails in those it is told to."""

    def __init__(self, calls: list[str], name: str, **fails: Exception) -> None:
        self._calls, self._name, self._fails = calls, name, fails

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> None:
            self._calls.append(f"{self._name}.{method}")
            if method in self._fails:
                raise self._fails[method]

        return call


def replica_of(calls: list[str], monkeypatch: pytest.MonkeyPatch, **parts: Any) -> Replica:
    monkeypatch.setattr(launch, "remove_placement_group", lambda group: calls.append("group"))
    replica = object.__new__(Replica)
    replica.__dict__.update(
        _lock=threading.Lock(), _is_stopping=False, _owns_group=True, _group=None, _watch=None,
        _gang=Noted(calls, "gang"), _nodes=Noted(calls, "nodes"), engine=Noted(calls, "engine"),
        _targets=[Noted(calls, "target")], _drafts=[Noted(calls, "draft")],
    )  # fmt: skip
    replica.__dict__.update(parts)
    return replica


ALL = ["engine.stop", "gang.close", "target.kill", "draft.kill", "nodes.close", "group"]


def test_a_step_that_does_not_end_keeps_no_process_listener_or_group_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    engine = Noted(calls, "engine", stop=TimeoutError("the verifier's thread did not end"))
    replica = replica_of(calls, monkeypatch, engine=engine)
    replica.stop()
    replica.stop()
    assert calls == ALL


def test_what_fails_while_it_ends_is_said_after_all_the_rest_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    gang = Noted(calls, "gang", close=OSError("no way out"))
    with pytest.raises(OSError, match="no way out"):
        replica_of(calls, monkeypatch, _gang=gang).stop()
    assert calls == ALL


def test_a_rebuild_in_progress_makes_no_process_once_the_replica_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    replica = replica_of(calls, monkeypatch)
    begun, outcome = threading.Event(), []

    class Engine:
        def draft_lost(self) -> str:
            return "gone"

        def is_running(self) -> bool:
            return True

    def rebuild(generation: int) -> Any:
        begun.set()
        while not replica._is_stopping:
            pass
        try:
            replica._create_drafts()
        except InterruptedError as error:
            outcome.append(str(error))
            raise

    replica._watch = DraftWatch(Engine(), rebuild, period_s=0.001)  # type: ignore[arg-type]
    assert begun.wait(20)
    replica.stop()
    assert outcome == ["the replica stops"]
    assert calls == ["draft.kill", *ALL], "the lost one first, then all the rest"
