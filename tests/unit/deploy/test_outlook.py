"""A request for which no engine replica is coming is told so; a restart is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace

import pytest
from ray.serve.exceptions import DeploymentUnavailableError

from actors.requests import FinishReason, GenerateRequest, RunOutput
from deploy.engine_client import HandleEngineClient
from deploy.openai.errors import from_exception
from deploy.outlook import NoReplicaComing, Outlook, ask_serve
from tests.unit.deploy.fakes import Call, ScriptedHandle

DONE = RunOutput("r", (1,), "x", (False,), None, 1, 0, 1, FinishReason.STOP)


class Routed:
    """An engine whose request waits in Serve's router, then is served or fails."""

    def __init__(self, error: Exception | None) -> None:
        self.released, self.error = asyncio.Event(), error

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RunOutput]:
        await self.released.wait()
        if self.error is not None:
            raise self.error
        yield DONE


def ask(
    says: Callable[[int], str | None],
    *,
    released_after: int | None = None,
    error: Exception | None = None,
) -> tuple[list[RunOutput], Call, int]:
    """Outputs of a request; Serve `says` at its n-th look, and releases the request after some."""

    async def run() -> tuple[list[RunOutput], Call, int]:
        loop, looks = asyncio.get_running_loop(), 0
        engine = Routed(error)

        def look() -> str | None:
            nonlocal looks
            looks += 1
            if looks == released_after:
                loop.call_soon_threadsafe(engine.released.set)
            return says(looks)

        if error is not None:
            engine.released.set()
        handle = ScriptedHandle(engine)
        client = HandleEngineClient(handle, Outlook(look, look_s=0.001, again_s=0.001))
        try:
            outputs = [out async for out in client.generate(GenerateRequest("r", [1]))]
        except NoReplicaComing:
            assert handle.calls[0].is_cancelled
            raise
        finally:
            await client.aclose()
        return outputs, handle.calls[0], looks

    return asyncio.run(run())


def test_a_restart_is_waited_for_and_a_moment_between_two_starts_is_none() -> None:
    outputs, call, looks = ask(lambda n: "none now" if n == 3 else None, released_after=6)
    assert outputs == [DONE] and looks >= 6 and not call.is_cancelled


def test_a_request_that_waits_for_nobody_ends_and_says_why() -> None:
    with pytest.raises(NoReplicaComing, match="is coming: it failed three times") as caught:
        ask(lambda n: "it failed three times" if n > 2 else None)
    answer = from_exception(caught.value, "id")
    assert answer.status == 503 and "it failed three times" in answer.message


def test_a_deployment_that_is_refused_at_once_is_told_apart_from_one_that_restarts() -> None:
    error = DeploymentUnavailableError(SimpleNamespace(name="Engine", app_name="a"))
    with pytest.raises(DeploymentUnavailableError):
        ask(lambda n: None, error=error)
    with pytest.raises(NoReplicaComing):
        ask(lambda n: "failed", error=error)


def test_many_requests_share_one_look() -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(1)

    async def run() -> None:
        outlook = Outlook(look, look_s=60.0)
        await asyncio.gather(*[outlook.check() for _ in range(300)])

    asyncio.run(run())
    assert len(looks) == 1


@pytest.mark.parametrize(
    ("status", "states", "is_coming"),
    [
        ("HEALTHY", {}, True),  # scaled to zero
        ("UPDATING", {"STOPPING": 1}, True),
        ("UNHEALTHY", {"STARTING": 1}, True),
        ("UNHEALTHY", {"STOPPING": 1}, False),
        ("DEPLOY_FAILED", {"RUNNING": 1}, True),  # the one before still serves
        ("DEPLOY_FAILED", {}, False),
    ],
)
def test_what_serve_says(
    monkeypatch: pytest.MonkeyPatch, status: str, states: dict[str, int], is_coming: bool
) -> None:
    from ray import serve
    from ray.serve.schema import DeploymentStatus

    engine = SimpleNamespace(
        status=DeploymentStatus(status), replica_states=states, message="failed 3 times\ndetails"
    )
    app = SimpleNamespace(deployments={"Engine": engine})
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"a": app}))
    reason = ask_serve("a", "Engine")
    if is_coming:
        assert reason is None
    else:
        assert reason == f"deployment Engine is {status}: failed 3 times"
    assert "no deployment" in str(ask_serve("other", "Engine"))
