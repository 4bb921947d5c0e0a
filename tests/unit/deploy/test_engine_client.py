"""Questions to all replicas: one that hangs or died costs its own answer, not the others'."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deploy.engine_client import HandleEngineClient


class Hung:
    async def get_async(self) -> Any:
        await asyncio.Event().wait()


class Answered:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def get_async(self) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Handle:
    """What of a Serve handle is used to ask all replicas."""

    def __init__(self, *results: Any) -> None:
        self.results: tuple[Any, ...] = results

    def options(self, **_: Any) -> Handle:
        return self

    def broadcast(self, method: str) -> Handle:
        return self

    async def _fetch_replica_results_async(self) -> Any:
        return self.results


def report(name: str) -> Answered:
    return Answered((name, "", {"num_running": 1}))


def test_one_replica_that_fails_is_one_row_with_its_name() -> None:
    handle = Handle(report("a"), report("b"), report("c"))
    client = HandleEngineClient(handle)

    async def go() -> None:
        assert [r.replica for r in await client.reports(0.05)] == ["a", "b", "c"]
        handle.results = report("a"), Hung(), report("c")
        for _ in range(2):  # it stays known
            a, c, lost = await client.reports(0.05)
            assert (a.replica, a.reason, c.replica) == ("a", "", "c")
            assert lost == ("b", "it did not answer in 0.05 s", {})
        handle.results = report("a"), Answered(RuntimeError("gone")), report("c")
        assert (await client.reports(0.05))[-1] == ("b", "it was lost: gone", {})
        # Two have failed and a new one came: nobody is blamed by guessing.
        handle.results = report("d"), Hung(), Hung()
        assert [r.replica for r in await client.reports(0.05)] == ["d", "", ""]

    asyncio.run(go())


def test_facts_come_from_whoever_answers_first() -> None:
    client = HandleEngineClient(Handle(Hung(), Answered(RuntimeError()), Answered({"served": 1})))
    assert asyncio.run(client.describe(5.0)) == {"served": 1}
    silent = HandleEngineClient(Handle(Hung(), Answered(RuntimeError())))
    with pytest.raises(TimeoutError):
        asyncio.run(silent.describe(0.05))
