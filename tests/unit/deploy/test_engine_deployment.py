"""The Engine deployment over a fake replica, without Ray."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.errors import EngineDead, EngineStopped, QueueFull
from actors.requests import FinishReason, GenerateRequest, RunOutput
from actors.stats import EngineStats
from actors.verifier.engine import EngineStatus
from actors.verifier.request import Sink
from deploy.api_keys import ApiKeys
from deploy.app import build
from deploy.channel.receiver import Inbox, Receiver
from deploy.engine import Engine
from deploy.failures import Unauthenticated
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
        self.sinks: dict[str, Sink] = {}
        self.aborted: list[str] = []
        self.deliver: Callable[[], None] = lambda: None
        self.is_full = False
        self.end: EngineDead | None = None

    def after_delivery(self, what: Callable[[], None]) -> None:
        self.deliver = what

    def add_request(self, request: GenerateRequest, sink: Sink) -> None:
        if self.is_full:
            raise QueueFull(1, 1, 1)
        self.sinks[request.request_id] = sink

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def ended_with(self, out: RunOutput) -> EngineDead | None:
        return self.end if out.error is not None else None

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
            step_limit_s=20.0,
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
    replica.engine.since = 9.0
    assert asyncio.run(deployment.report()).reason == ""
    replica.engine.since = 11.0  # half of what the step may take: said, and not yet the end
    assert "for 11 s, with work waiting" in asyncio.run(deployment.report()).reason
    asyncio.run(deployment.check_health())
    replica.engine.since = 41.0
    with pytest.raises(EngineDead, match="no step was completed for 41 s"):
        asyncio.run(deployment.check_health())
    replica.engine.since, replica.engine.healthy = 0.0, False
    with pytest.raises(EngineDead, match="rank 0"):
        asyncio.run(deployment.check_health())
    assert "rank 0" in asyncio.run(deployment.report()).reason


TYPOS = [{"speculation_enable": False}, {"max_speculative_tokens": 5}]


@pytest.mark.parametrize("typo", TYPOS)
def test_a_first_start_is_refused_for_knobs_that_cannot_work(
    deployment: Engine, replica: FakeReplica, typo: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(typo))):
        deployment.reconfigure(typo)
    assert replica.engine.knobs == []


@pytest.mark.parametrize("typo", TYPOS)
def test_a_running_engine_keeps_its_knobs_for_wrong_ones_and_says_why(
    deployment: Engine, replica: FakeReplica, typo: dict[str, Any]
) -> None:
    def told() -> tuple[Any, Any]:
        report = asyncio.run(deployment.report())
        assert report.reason == ""
        facts = asyncio.run(deployment.describe())["user_config"]
        assert facts["max_speculative_tokens"] == deployment._knobs.max_speculative_tokens
        return report.stats["user_config_refused"], facts["refused"]

    deployment.reconfigure({"speculation_enabled": False})
    deployment.reconfigure({"max_speculative_tokens": 2})
    assert told() == (False, None)
    deployment.reconfigure(typo)
    assert replica.engine.knobs == [(False, 4), (True, 2)]
    is_refused, why = told()
    assert is_refused and next(iter(typo)) in why
    deployment.reconfigure(None)
    assert replica.engine.knobs[-1] == (True, 4) and told() == (False, None)


def run_of(name: str, **fields: Any) -> RunOutput:
    return RunOutput(name, (1,), "x", (False,), None, 1, 0, 1, **fields)


def test_a_request_is_in_progress_until_its_last_run_is_out(
    deployment: Engine, replica: FakeReplica
) -> None:
    engine = replica.engine
    assert inspect.iscoroutinefunction(deployment.generate)  # Serve runs functions in threads

    async def go() -> None:
        front = Receiver("local", "127.0.0.1")
        inboxes = {name: front.expect(name) for name in "abcd"}
        served = {
            name: asyncio.ensure_future(
                deployment.generate(GenerateRequest(name, [1]), front.reply_to)
            )
            for name in "abcd"
        }
        for inbox in inboxes.values():
            assert (await inbox.next()).is_acknowledgment
        # The runs of a step arrive together, when the step has given all of them.
        for name in "ab":
            engine.sinks[name](run_of(name))
        engine.sinks["a"](run_of("a", finish_reason=FinishReason.STOP))
        assert await is_silent(inboxes["a"])
        engine.deliver()
        assert [(await inboxes["a"].next()).finish_reason for _ in range(2)] == [None, "stop"]
        await served["a"]
        assert not served["b"].done() and engine.aborted == []
        # A caller that leaves, an engine that ends, a front that goes away.
        served["b"].cancel()
        await asyncio.gather(served["b"], return_exceptions=True)
        assert engine.aborted == ["b"]
        engine.end = EngineStopped("the engine was stopped")
        engine.sinks["c"](run_of("c", error="stopped"))
        with pytest.raises(EngineStopped):
            await served["c"]
        await front.aclose()
        with pytest.raises(EngineDead, match="a front is gone"):
            await served["d"]
        assert "d" in engine.aborted

    asyncio.run(go())


async def is_silent(inbox: Inbox) -> bool:
    try:
        async with asyncio.timeout(0.02):
            await inbox.next()
    except TimeoutError:
        return True
    return False


def test_a_refusal_is_the_calls_own_error(deployment: Engine, replica: FakeReplica) -> None:
    async def go() -> None:
        front = Receiver("local", "127.0.0.1")
        inbox = front.expect("a")
        replica.engine.is_full = True
        with pytest.raises(QueueFull):
            await deployment.generate(GenerateRequest("a", [1]), front.reply_to)
        assert await is_silent(inbox), "nobody took it"
        await front.aclose()

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
    assert not ApiKeys.from_environment(None)
    monkeypatch.setenv("KEYS", " one, two ,")
    keys = ApiKeys.from_environment("KEYS")
    keys.check("Bearer one")
    keys.check("bearer  two ")
    for wrong in ("", "Bearer", "Bearer three", "Basic one", "one", "Bearer one,two"):
        with pytest.raises(Unauthenticated):
            keys.check(wrong)
    monkeypatch.setenv("KEYS", "")
    with pytest.raises(ValueError, match="KEYS"):
        ApiKeys.from_environment("KEYS")


def test_a_redeploy_keeps_an_ingress_until_its_successor_is_ready(args: AppArgs) -> None:
    ingress = build(args)._bound_deployment
    assert ingress.name == "Ingress" and ingress._deployment_config.max_surge_percent == 100
