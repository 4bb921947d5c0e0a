"""The Engine deployment over a fake replica, without Ray."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.errors import EngineDead
from actors.requests import GenerateRequest, RunOutput
from actors.stats import EngineStats
from actors.verifier.engine import EngineStatus
from deploy.app import api_keys
from deploy.engine import STALE_STEP_S, Engine
from deploy.metrics import METRICS
from specconfig.app_args import AppArgs
from specconfig.errors import ConfigError
from tests.tiny import write_tiny_config


class FakeEngine:
    def __init__(self) -> None:
        self.healthy = True
        self.since = 0.0
        self.counters = EngineStats()
        self.knobs: list[tuple[bool, int | None]] = []
        self.closed = False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RunOutput]:
        try:
            for n in range(5):
                yield RunOutput(request.request_id, (n,), "x", (False,), None, 1, 0, n + 1)
                await asyncio.sleep(0)
        finally:
            self.closed = True

    def set_speculation(self, enabled: bool, max_tokens: int | None) -> None:
        self.knobs.append((enabled, max_tokens))

    def status(self) -> EngineStatus:
        return EngineStatus(
            is_healthy=self.healthy,
            error=None if self.healthy else "WorkerLost: rank 0",
            draft_lost=None,
            num_running=1,
            num_waiting=2,
            num_blocks=10,
            num_free_blocks=6,
            num_cached_blocks=1,
            num_referenced_blocks=3,
            seconds_since_step=self.since,
            stats=self.counters.snapshot(),
        )


class FakeReplica:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.stopped = False

    def describe(self) -> dict[str, Any]:
        return {"actors": []}

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def args(tmp_path: Path) -> AppArgs:
    return AppArgs(
        model=str(write_tiny_config(tmp_path / "m")),
        served_model_name="tiny",
        device="cpu",
        speculative_config={"method": "ngram", "num_speculative_tokens": 4,
                            "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    )  # fmt: skip


@pytest.fixture
def replica() -> FakeReplica:
    return FakeReplica()


@pytest.fixture
def deployment(args: AppArgs, replica: FakeReplica) -> Iterator[Engine]:
    made = Engine(args, start=lambda config, group, seat: replica)
    yield made
    # Serve awaits `__del__`; garbage collection would leave a coroutine that nobody awaits.
    made.__class__ = type("Ended", (), {})  # type: ignore[assignment]


def test_the_snapshot_has_every_metric_of_the_table(deployment: Engine) -> None:
    report = asyncio.run(deployment.report())
    assert report.reason == ""
    missing = {m.source for m in METRICS if m.source} - set(report.stats)
    assert not missing


def test_a_stale_and_a_broken_engine_are_unhealthy(
    deployment: Engine, replica: FakeReplica
) -> None:
    asyncio.run(deployment.check_health())
    replica.engine.since = STALE_STEP_S + 1
    with pytest.raises(EngineDead, match="no step was completed"):
        asyncio.run(deployment.check_health())
    replica.engine.since, replica.engine.healthy = 0.0, False
    with pytest.raises(EngineDead, match="rank 0"):
        asyncio.run(deployment.check_health())
    assert "rank 0" in asyncio.run(deployment.report()).reason


def test_runtime_knobs_reach_the_engine_and_wrong_ones_are_refused(
    deployment: Engine, replica: FakeReplica
) -> None:
    deployment.reconfigure({"speculation_enabled": False})
    deployment.reconfigure({"max_speculative_tokens": 2})
    deployment.reconfigure(None)
    assert replica.engine.knobs == [(False, 4), (True, 2), (True, 4)]
    with pytest.raises(ConfigError, match="speculation_enable"):
        deployment.reconfigure({"speculation_enable": False})
    with pytest.raises(ValueError, match="max_speculative_tokens=5"):
        deployment.reconfigure({"max_speculative_tokens": 5})


def test_leaving_a_stream_closes_it_at_once(deployment: Engine, replica: FakeReplica) -> None:
    async def go() -> None:
        runs = await deployment.generate(GenerateRequest("r", [1]))
        # What Serve can stream and cancel.
        assert inspect.iscoroutinefunction(deployment.generate) and inspect.isasyncgen(runs)
        await anext(runs)
        await runs.aclose()
        assert replica.engine.closed

    asyncio.run(go())


def test_drafts_that_are_never_accepted_are_reported_once(
    deployment: Engine, replica: FakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("ray.serve")
    logger.addHandler(caplog.handler)  # Serve's logger does not propagate
    try:
        for _ in range(250):
            replica.engine.counters.observe_drafts(4, 0)
        asyncio.run(deployment.check_health())
        asyncio.run(deployment.check_health())
    finally:
        logger.removeHandler(caplog.handler)
    warnings = [r for r in caplog.records if "not one token accepted" in r.getMessage()]
    assert len(warnings) == 1


def test_the_description_is_json_without_the_checkpoint_s_config(deployment: Engine) -> None:
    import json

    facts = asyncio.run(deployment.describe())
    assert json.loads(json.dumps(facts))["served"]["name"] == "tiny"
    assert "hf_config" not in facts["config"]["model"]


def test_the_end_stops_the_replica(deployment: Engine, replica: FakeReplica) -> None:
    asyncio.run(deployment.__del__())
    assert replica.stopped
    with pytest.raises(EngineDead, match="shutting down"):
        asyncio.run(deployment.check_health())


def test_api_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert api_keys(None) == ()
    monkeypatch.setenv("KEYS", " one, two ,")
    assert api_keys("KEYS") == ("one", "two")
    monkeypatch.setenv("KEYS", "")
    with pytest.raises(ValueError, match="KEYS"):
        api_keys("KEYS")
