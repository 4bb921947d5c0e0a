"""Streams that outlive the replica they started on: no token lost, none twice."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from actors.errors import EngineDead, InvalidRequest, QueueFull, RequestLost
from actors.requests import FinishReason, GenerateRequest, RunOutput
from deploy.recovery import RecoveryPolicy, generate_with_recovery
from deploy.text import TextProcessor
from tests.unit.deploy.fakes import ScriptedEngine

SCRIPT = "Grüße, 世界 🦜! And more."
FAST = RecoveryPolicy(max_losses=2, patience_s=0.3, first_delay_s=0.001, max_delay_s=0.01)


def collect(
    engine: ScriptedEngine, text: TextProcessor, max_tokens: int | None = None, min_tokens: int = 0
) -> list[RunOutput]:
    request = GenerateRequest(
        "r", [1, 2, 3], max_tokens=max_tokens, min_tokens=min_tokens, seed=7, num_logprobs=0
    )

    async def go() -> list[RunOutput]:
        runs = generate_with_recovery(engine, request, text.token_bytes, FAST)
        return [run async for run in runs]

    return asyncio.run(go())


def check_whole(runs: list[RunOutput], script: str = SCRIPT) -> None:
    ids = [token for run in runs for token in run.token_ids]
    assert bytes(ids) == script.encode()
    assert "".join(run.text for run in runs) == script
    assert [entry.token_id for run in runs for entry in run.logprobs or ()] == ids
    assert sum(len(run.accepted) for run in runs) == len(ids)
    assert runs[-1].num_output_tokens == len(ids)
    assert {run.num_prompt_tokens for run in runs} == {3}
    assert [run.finish_reason for run in runs[:-1]] == [None] * (len(runs) - 1)


@pytest.mark.parametrize("run_length", [1, 2, 3, 5])
@pytest.mark.parametrize("lost_at", range(12))
def test_a_lost_replica_does_not_show(text: TextProcessor, run_length: int, lost_at: int) -> None:
    engine = ScriptedEngine(SCRIPT, run_length)
    engine.failures = {0: (lost_at, ActorDiedError())}
    runs = collect(engine, text)
    check_whole(runs)
    assert runs[-1].finish_reason is FinishReason.STOP
    assert {request.seed for request in engine.requests} == {7}
    assert len({request.request_id for request in engine.requests}) == len(engine.requests)


def test_two_losses_and_a_full_queue_on_the_way(text: TextProcessor) -> None:
    engine = ScriptedEngine(SCRIPT, 2)
    engine.failures = {
        0: (3, ActorDiedError()),
        1: (0, QueueFull(1, 1, 1)),
        2: (0, BackPressureError(num_queued_requests=1, max_queued_requests=1)),
        3: (2, EngineDead("WorkerLost")),
    }
    check_whole(collect(engine, text))


def test_limits_count_what_was_already_delivered(text: TextProcessor) -> None:
    engine = ScriptedEngine("abcdefghij", 2)
    engine.failures = {0: (2, ActorDiedError())}
    runs = collect(engine, text, max_tokens=7, min_tokens=6)
    check_whole(runs, "abcdefg")
    assert runs[-1].finish_reason is FinishReason.LENGTH
    assert engine.requests[1].max_tokens == 3
    assert engine.requests[1].min_tokens == 2
    assert list(engine.requests[1].prompt_token_ids) == [1, 2, 3, *b"abcd"]


def test_a_loss_after_the_last_token_ends_by_length(text: TextProcessor) -> None:
    engine = ScriptedEngine("abcdef", 2)

    class LosesTheEnd(ScriptedEngine):
        async def generate(self, request):
            async for run in engine.generate(request):
                if run.finish_reason is None:
                    yield run
                else:
                    import dataclasses

                    yield dataclasses.replace(run, finish_reason=None)
            raise ActorDiedError()

    runs = collect(LosesTheEnd(), text, max_tokens=6)
    assert bytes(t for run in runs for t in run.token_ids) == b"abcdef"
    assert runs[-1].finish_reason is FinishReason.LENGTH


def test_speculation_counters_add_up(text: TextProcessor) -> None:
    engine = ScriptedEngine("abcdefghij", 2)
    engine.failures = {0: (2, ActorDiedError())}
    runs = collect(engine, text)
    assert runs[-1].speculation.num_drafts == 5
    assert runs[-1].speculation.num_accepted_tokens == 5


@pytest.mark.parametrize("loss", [(1, ActorDiedError()), (0, RequestLost("WorkerLost"))])
def test_a_request_that_ends_every_engine_is_given_up(
    text: TextProcessor, loss: tuple[int, Exception]
) -> None:
    """After its first token, or in its prefill with the engine's word that it had begun."""
    engine = ScriptedEngine("a" * 100, 1)
    engine.failures = dict.fromkeys(range(50), loss)
    with pytest.raises(EngineDead, match="3 lost engines"):
        collect(engine, text)
    assert len(engine.requests) == 3


def test_waiting_for_a_replica_that_takes_the_request_is_bounded(text: TextProcessor) -> None:
    engine = ScriptedEngine("abc")
    engine.failures = {n: (0, EngineDead("down")) for n in range(10_000)}
    with pytest.raises(EngineDead, match="down"):
        collect(engine, text)


def test_other_errors_are_not_retried(text: TextProcessor) -> None:
    engine = ScriptedEngine("abc")
    for error in (InvalidRequest("no"), QueueFull(1, 1, 1), RuntimeError("bug"), TimeoutError()):
        engine.requests, engine.failures = [], {0: (0, error)}
        with pytest.raises(type(error)):
            collect(engine, text)
        assert len(engine.requests) == 1
