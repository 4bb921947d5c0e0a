"""Streams that outlive the replica they started on: no token lost, none twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from actors.errors import EngineDead, InvalidRequest, QueueFull, RequestLost
from actors.requests import FinishReason, GenerateRequest, RunOutput
from deploy.failures import RequestAborted
from deploy.recovery import RecoveryPolicy, generate_with_recovery
from deploy.text import TextProcessor
from tests.unit.deploy.fakes import ScriptedEngine

SCRIPT = "Grüße, 世界 🦜! And more."
FAST = RecoveryPolicy(max_losses=6, patience_s=0.3, first_delay_s=0.001, max_delay_s=0.01)


def collect(
    engine: ScriptedEngine, text: TextProcessor, max_tokens: int | None = None, min_tokens: int = 0
) -> list[RunOutput]:
    request = GenerateRequest(
        "r", [1, 2, 3], max_tokens=max_tokens, min_tokens=min_tokens, seed=7, num_logprobs=0
    )

    async def go() -> list[RunOutput]:
        runs = generate_with_recovery(engine, request, text.token_bytes, FAST)
        return [run async for run in runs if not run.is_acknowledgment]

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


class Engines:
    """Several requests on engines that end, with all they have taken, when one of them runs."""

    def __init__(self, loss: Exception, run_length: int = 1, acknowledges: bool = True) -> None:
        self.loss = loss
        self.run_length = run_length
        self.acknowledges = acknowledges
        self.deaths = 0
        self.tries: dict[str, int] = {}
        self._inside = 0
        self._ended = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RunOutput]:
        name = request.request_id.partition("-")[0]
        self.tries[name] = self.tries.get(name, 0) + 1
        ended = self._ended
        if self.acknowledges:
            yield RunOutput.acknowledgment(name, 1)
        for _ in range(3):  # its prefill; the others come in meanwhile
            await asyncio.sleep(0)
        if name.startswith("poison"):
            self.deaths += 1
            self._ended = asyncio.Event()
            ended.set()
        for n in range(len(request.prompt_token_ids), 9):
            if ended.is_set():
                raise self.loss
            reason = FinishReason.STOP if n == 8 else None
            yield RunOutput(name, (n,), str(n), (False,), None, 1, 0, n, reason)
            await asyncio.sleep(0)

    async def ask(self, name: str, text: TextProcessor) -> str | Exception:
        request = GenerateRequest(name, [1], seed=7)
        try:
            runs = generate_with_recovery(self, request, text.token_bytes, FAST)
            return "".join([run.text async for run in runs])
        except Exception as error:
            return error


@pytest.mark.parametrize("loss", [ActorDiedError(), RequestLost("WorkerLost")])
@pytest.mark.parametrize("num_poisons", [1, 3])
def test_a_request_that_ends_engines_is_given_up_and_no_other(
    text: TextProcessor, loss: Exception, num_poisons: int
) -> None:
    async def go() -> tuple[Engines, dict[str, str | Exception]]:
        engines = Engines(loss)
        names = [f"poison{n}" for n in range(num_poisons)] + [f"good{n}" for n in range(12)]
        answers = await asyncio.gather(*(engines.ask(name, text) for name in names))
        return engines, dict(zip(names, answers, strict=True))

    engines, answers = asyncio.run(go())
    for name, answer in answers.items():
        if name.startswith("poison"):
            assert isinstance(answer, RequestAborted) and name in str(answer)
            assert engines.tries[name] == 2
        else:
            assert answer == "12345678"
    assert engines.deaths <= 2 * num_poisons


def test_an_engines_own_word_counts_without_an_acknowledgment(text: TextProcessor) -> None:
    async def go(loss: Exception) -> tuple[Engines, str | Exception]:
        engines = Engines(loss, acknowledges=False)
        return engines, await engines.ask("poison", text)

    engines, answer = asyncio.run(go(RequestLost("WorkerLost")))
    assert isinstance(answer, RequestAborted) and engines.deaths == 2
    engines, answer = asyncio.run(go(ActorDiedError()))
    assert isinstance(answer, EngineDead), "nobody took it: bounded by patience"


def test_a_stream_outlives_many_engines_while_it_gets_on(text: TextProcessor) -> None:
    engine = ScriptedEngine(SCRIPT, 1)
    engine.failures = dict.fromkeys(range(FAST.max_losses), (4, ActorDiedError()))
    check_whole(collect(engine, text))
    engine = ScriptedEngine("a" * 100, 1)
    engine.failures = dict.fromkeys(range(50), (1, ActorDiedError()))
    with pytest.raises(EngineDead, match="7 lost engines"):
        collect(engine, text)


def test_a_caller_hears_once_that_its_request_was_taken(text: TextProcessor) -> None:
    async def go() -> list[RunOutput]:
        engines = Engines(ActorDiedError())
        first = asyncio.ensure_future(engines.ask("poison", text))
        runs = generate_with_recovery(
            engines, GenerateRequest("good", [1], seed=7), text.token_bytes, FAST
        )
        heard = [run async for run in runs]
        await first
        assert engines.tries["good"] > 1
        return heard

    heard = asyncio.run(go())
    assert [run.is_acknowledgment for run in heard] == [True] + [False] * 8


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
