from __future__ import annotations

import time
from pathlib import Path

import pytest

from actors.errors import PromptTooLong, QueueFull
from deploy.client import Client
from deploy.openai.errors import ApiError
from tests.tiny import write_tiny_config
from tests.unit.deploy.fakes import ScriptedEngine


@pytest.fixture
def client(engine: ScriptedEngine, tmp_path: Path) -> Client:
    engine.served["tokenizer"] = str(write_tiny_config(tmp_path / "m"))
    return Client(engine=engine)


def test_generate(client: Client, engine: ScriptedEngine) -> None:
    made = client.generate("hi", max_tokens=5, temperature=0, stop=["x"])
    assert (made.text, made.finish_reason) == ("Hello", "length")
    assert bytes(made.token_ids) == b"Hello" and len(made.accepted) == 5
    assert made.usage["completion_tokens"] == 5
    assert engine.requests[0].stop == ("x",)


def test_token_ids_and_conversations(client: Client, engine: ScriptedEngine) -> None:
    client.generate([1, 2, 3], max_tokens=2)
    assert engine.requests[0].prompt_token_ids == [1, 2, 3]
    engine.prompt_len = None
    client.generate(messages=[{"role": "user", "content": "hi"}])
    assert len(engine.requests[1].prompt_token_ids) == 5


def test_stream_and_leave(client: Client, engine: ScriptedEngine) -> None:
    engine.delay_s = 0.01
    runs = client.stream("hi", max_tokens=11)
    assert next(runs).text == "Hel"
    runs.close()
    deadline = time.monotonic() + 2
    while not engine.closed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.closed


def test_mistakes(client: Client, engine: ScriptedEngine) -> None:
    with pytest.raises(ApiError, match="max_token"):
        client.generate("hi", max_token=5)
    with pytest.raises(ValueError, match="either"):
        client.generate()
    with pytest.raises(PromptTooLong):
        client.generate("x" * 300)
    engine.failures = {len(engine.requests): (0, QueueFull(1, 1, 1))}
    with pytest.raises(QueueFull):
        client.generate("hi")
