"""Channels between engine replicas and fronts: what crosses them, who is slow, who goes away."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from actors.requests import (
    FinishReason,
    GenerateRequest,
    RunOutput,
    SpeculationStats,
    TokenLogprob,
)
from deploy.channel import sender
from deploy.channel.messages import ChannelLost, pack_runs, unpack_runs
from deploy.channel.receiver import Receiver
from deploy.channel.sender import Channels
from deploy.engine_client import HandleEngineClient
from deploy.failures import is_replica_loss
from tests.unit.deploy.fakes import ScriptedEngine, ScriptedHandle

EVERYTHING = RunOutput(
    "a", (1, 2), "x\udcff\u2028", (True, False),
    (TokenLogprob(1, float("-inf"), ((1, -0.5), (2, -1.5))), TokenLogprob(2, -0.25)),
    3, 2, 5, FinishReason.STOP, "end", SpeculationStats(4, 3, 9, 5, (3, 2)), "why",
)  # fmt: skip
PLAIN = RunOutput("b", (1,), "", (False,), None, 4, 0, 1, stop_reason=7)


def run_of(name: str, text: str = "x", **fields: Any) -> RunOutput:
    return RunOutput(name, (1,), text, (False,), None, 1, 0, 1, **fields)


def taken(name: str) -> RunOutput:
    return RunOutput.acknowledgment(name, 1)


async def said_by(runs: AsyncGenerator[RunOutput]) -> str:
    async with aclosing(runs):
        return "".join([run.text async for run in runs])


def test_a_run_arrives_as_it_was() -> None:
    for field in dataclasses.fields(RunOutput):
        assert getattr(EVERYTHING, field.name) != getattr(PLAIN, field.name)
    runs = [EVERYTHING, PLAIN, taken("c")]
    assert unpack_runs(pack_runs(runs)) == runs
    assert isinstance(unpack_runs(pack_runs(runs))[0].finish_reason, FinishReason)


@pytest.mark.parametrize("node", ["local", "another"])
def test_many_requests_share_one_connection(node: str) -> None:
    engine = ScriptedEngine("Hello world", run_length=1)
    handle = ScriptedHandle(engine, node)

    async def go() -> None:
        client = HandleEngineClient(handle)
        try:
            said = await asyncio.gather(
                *[said_by(client.generate(GenerateRequest(f"r{n}", [1]))) for n in range(20)]
            )
            assert set(said) == {"Hello world"} and len(handle.channels._open) == 1
            assert not client._receiver._inboxes
        finally:
            await client.aclose()
            await client.aclose()

    asyncio.run(go())


def test_several_fronts_and_replicas_do_not_mix() -> None:
    async def go() -> None:
        handles = [ScriptedHandle(ScriptedEngine(text, 1)) for text in ("one", "two")]
        clients = [HandleEngineClient(handle) for handle in handles]
        # Both replicas serve both fronts: each request has its own way, under the same name.
        shared = HandleEngineClient(handles[0])
        shared._submit = handles[1]
        both = await asyncio.gather(
            *[said_by(client.generate(GenerateRequest("r", [1]))) for client in (*clients, shared)]
        )
        assert both == ["one", "two", "two"]
        assert [len(handle.channels._open) for handle in handles] == [1, 2]
        for client in (*clients, shared):
            await client.aclose()

    asyncio.run(go())


def test_who_leaves_ends_the_call_and_no_other() -> None:
    engine = ScriptedEngine("Hello world", run_length=1)
    engine.delay_s = 0.005
    handle = ScriptedHandle(engine)

    async def go() -> None:
        client = HandleEngineClient(handle)
        left = client.generate(GenerateRequest("left", [1]))
        stays = asyncio.ensure_future(said_by(client.generate(GenerateRequest("stays", [1]))))
        while not (await anext(left)).text:
            pass
        await left.aclose()
        assert handle.calls[0].is_cancelled
        assert await stays == "Hello world" and not handle.calls[1].is_cancelled
        assert set(engine.closed) == {"left", "stays"}
        await client.aclose()

    asyncio.run(go())


def test_a_front_that_takes_nothing_holds_nobody_up_and_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender, "MAX_UNSENT_BYTES", 1 << 20)
    text = "x" * 1000

    async def go() -> None:
        channels = Channels("local")
        slow, quick = Receiver("local", "127.0.0.1"), Receiver("local", "127.0.0.1")
        inbox = quick.expect("quick")
        with (
            (await channels.to(slow.reply_to)).delivery(taken("slow")) as to_slow,
            (await channels.to(quick.reply_to)).delivery(taken("quick")) as to_quick,
        ):
            while not slow._connections:
                await asyncio.sleep(0.001)
            (connection,) = slow._connections
            asyncio.get_running_loop().remove_reader(connection.fileno())  # it hangs
            num_steps = 0
            with pytest.raises(ChannelLost):
                while num_steps < 10_000:
                    to_slow.put(run_of("slow", text))
                    to_quick.put(run_of("quick"))
                    channels.flush()
                    num_steps += 1
                    await asyncio.sleep(0)
            assert 1000 < num_steps < 10_000
            for _ in range(num_steps):
                assert (await inbox.next()).request_id == "quick"
            assert isinstance(to_slow.done.exception(), ChannelLost)
            to_quick.put(run_of("quick", finish_reason=FinishReason.STOP))
            channels.flush()
            await asyncio.wait_for(to_quick.done, 5)
        assert len(channels._open) == 1
        await slow.aclose()
        await quick.aclose()

    asyncio.run(go())


@pytest.mark.parametrize("node", ["local", "another"])
def test_what_did_not_fit_goes_out_when_there_is_room(node: str) -> None:
    text = "x" * 1000

    async def go() -> None:
        channels, front = Channels(node), Receiver("local", "127.0.0.1")
        inbox = front.expect("a")
        channel = await channels.to(front.reply_to)
        with channel.delivery(taken("a")) as delivery:
            for _ in range(20):  # frames of 400 kB, all before anyone reads
                for _ in range(400):
                    delivery.put(run_of("a", text))
                channels.flush()
            delivery.put(run_of("a", "end", finish_reason=FinishReason.STOP))
            channels.flush()
            assert channel._connection.num_unsent_bytes > 1 << 20 and not delivery.done.done()
            await asyncio.wait_for(delivery.done, 10)
        texts = [(await inbox.next()).text for _ in range(20 * 400 + 2)]
        assert texts == ["", *[text] * 8000, "end"]
        await front.aclose()

    asyncio.run(go())


class Lost:
    """An engine that goes away after some runs; `verdict`: what Ray comes to say of it."""

    def __init__(self, num_runs: int, verdict: Exception | None) -> None:
        self.num_runs, self.verdict = num_runs, verdict
        self.handle = ScriptedHandle(self)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RunOutput]:
        yield taken(request.request_id)
        for _ in range(self.num_runs):
            yield run_of(request.request_id)
        await asyncio.sleep(0)
        self.handle.channels.close()
        if self.verdict is None:
            await asyncio.Event().wait()
        else:
            await asyncio.sleep(0.01)
            raise self.verdict


@pytest.mark.parametrize(
    ("num_runs", "verdict", "raised"),
    [
        (1, None, ChannelLost),  # it had a token: nobody waits for Ray
        (0, ActorDiedError(), ActorDiedError),  # may be intended, which only Ray knows
    ],
)
def test_a_lost_connection_is_a_lost_replica(
    num_runs: int, verdict: Exception | None, raised: type[Exception]
) -> None:
    engine = Lost(num_runs, verdict)

    async def go() -> None:
        client = HandleEngineClient(engine.handle)
        with pytest.raises(raised) as caught:
            await asyncio.wait_for(said_by(client.generate(GenerateRequest("a", [1]))), 5)
        assert is_replica_loss(caught.value)
        await client.aclose()

    asyncio.run(go())


def test_a_front_that_cannot_be_reached_is_named() -> None:
    async def go() -> None:
        front = Receiver("local", "127.0.0.1")
        reply_to = front.reply_to
        stranger = reply_to._replace(tcp=reply_to.tcp._replace(secret=b"guessed"))
        channels = Channels("another")
        with pytest.raises(ChannelLost, match="cannot be reached"):
            await channels.to(stranger)
        await channels.to(reply_to)  # the others are served all the same
        await front.aclose()

    asyncio.run(go())


@pytest.mark.parametrize("node", ["local", "another"])
def test_a_front_that_has_ended_is_not_waited_for(node: str) -> None:
    async def go() -> None:
        front = Receiver("local", "127.0.0.1")
        reply_to = front.reply_to
        await front.aclose()
        with pytest.raises(ChannelLost, match="nobody listens"):
            await asyncio.wait_for(Channels(node).to(reply_to), 5)

    asyncio.run(go())
