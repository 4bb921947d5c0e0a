"""`paceline bench` against a server on loopback that speaks the API and nothing else."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from deploy import cli
from deploy.bench import command
from deploy.stops import Stops
from tests.unit.bench.fake_server import (
    DONE,
    END,
    FakeServer,
    chat_event,
    event,
    usage_event,
)

ANSWER = [chat_event(""), chat_event("One"), chat_event(" two"), END + usage_event(4) + DONE]


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """Runs in a loop of its own thread: the command has its own."""
    server = FakeServer(ANSWER)
    started = threading.Event()
    end: Callable[[], object] = bool

    async def serve() -> None:
        nonlocal end
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        end = partial(loop.call_soon_threadsafe, ended.set)
        async with server.running():
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(10)
    yield server
    end()
    thread.join(10)
    assert not thread.is_alive()


def run(*arguments: str) -> int:
    return cli.main(["bench", *arguments])


def test_clients_and_their_figures(fake: FakeServer, tmp_path: Path, capsys) -> None:
    fake.pause_s = 0.005
    out = tmp_path / "out.json"
    code = run(
        fake.url + "/v1", "--clients", "1,3", "--num-requests", "6", "--max-tokens", "4",
        "--prompts", "rewrite", "--json", str(out),
    )  # fmt: skip
    said = capsys.readouterr().out
    assert code == 0 and "3 clients" in said and "exactly 4 tokens" in said
    document = json.loads(out.read_text())
    assert (document["model"], document["ignore_eos"], document["has_usage"]) == (
        "tiny",
        True,
        True,
    )
    assert [r["load"] for r in document["runs"]] == [{"clients": 1}, {"clients": 3}]
    for figures in document["runs"]:
        assert (figures["num_completed"], figures["output_tokens"]) == (6, 24)
        assert figures["tokens_per_event"] == 2.0
        assert figures["time_to_first_token_ms"]["p50"] >= 5
    assert fake.most_at_once == 3
    # One probe, a warm-up request a client, the runs.
    assert len(fake.bodies) == 1 + (1 + 6) + (3 + 6)
    body = fake.bodies[-1]
    assert body["stream"] and body["ignore_eos"] and body["temperature"] == 0
    assert body["stream_options"] == {"include_usage": True} and "seed" not in body
    assert {b["max_tokens"] for b in fake.bodies[1:]} == {4}


def test_poisson_arrivals_seeds_and_further_fields(fake: FakeServer, capsys) -> None:
    code = run(
        fake.url, "--rate", "200", "--num-requests", "3", "--temperature", "0.5", "--seed", "7",
        "--warmup", "0", "--extra-body", '{"speculation": {"enabled": false}}',
    )  # fmt: skip
    assert code == 0 and "200 requests/s" in capsys.readouterr().out
    asked = fake.bodies[1:]
    assert sorted(b["seed"] for b in asked) == [7, 8, 9]
    assert all(b["speculation"] == {"enabled": False} for b in asked)


def test_plain_completions_are_asked_with_a_text(fake: FakeServer) -> None:
    assert run(fake.url, "--endpoint", "completions", "--num-requests", "1") == 0
    assert isinstance(fake.bodies[-1]["prompt"], str) and "messages" not in fake.bodies[-1]


def test_fields_that_a_server_refuses_are_left_out_and_said(fake: FakeServer, capsys) -> None:
    fake.refuses = ("ignore_eos", "stream_options")
    fake.pieces = [chat_event("a"), chat_event("b"), END + DONE]
    assert run(fake.url, "--num-requests", "2") == 0
    said = capsys.readouterr().out
    assert "does not take ignore_eos" in said and "sends no usage" in said


def test_drafts_are_read_from_metrics_where_usage_has_none(fake: FakeServer, capsys) -> None:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    fake.metrics = "\n".join(f'vllm:spec_decode_{n}_total{{model_name="m"}} 4.0' for n in names)
    assert run(fake.url, "--num-requests", "1") == 0
    # It drafted nothing meanwhile.
    assert "acceptance length" in capsys.readouterr().out


def test_errors_are_counted_and_shown(fake: FakeServer, capsys) -> None:
    fake.later = ([chat_event("One"), event({"error": {"message": "out of memory"}})], 0)
    assert run(fake.url, "--num-requests", "3") == 1
    said = capsys.readouterr().out
    assert "0 / 3 / 0" in said and "3 x out of memory" in said


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([chat_event("One")], "ended before"),
        ([b"data: {nothing\n\n", DONE], "no JSON"),
        ([event({"error": {"message": "too long a prompt"}})], "too long a prompt"),
    ],
)
def test_a_server_that_cannot_answer_is_one_line(
    fake: FakeServer, pieces: list[bytes], message: str, capsys
) -> None:
    fake.pieces = pieces
    assert run(fake.url) == 1
    error = capsys.readouterr().err
    assert error.startswith("paceline: ") and message in error and error.count("\n") == 1


def test_a_request_has_a_bound(fake: FakeServer, capsys) -> None:
    fake.later = (ANSWER, 5.0)
    assert run(fake.url, "--num-requests", "2", "--timeout", "0.1", "--warmup", "0") == 1
    assert "2 x no end after 0.1 s (--timeout)" in capsys.readouterr().out


def test_a_signal_ends_the_run_and_shows_what_was_measured(fake: FakeServer, capsys) -> None:
    fake.pause_s = 0.01
    said: list[str] = []
    with Stops() as stops:
        arguments = ["bench", fake.url, "--num-requests", "500"]
        options = cli._parser().parse_args(arguments)
        timer = threading.Timer(0.4, lambda: setattr(stops, "signum", 2))
        timer.start()
        assert command.bench(options, stops, said.append) == 130
    assert "stopped by a signal" in said[-1] and "/ 0 / 1" in said[-1]


def test_a_signal_before_anything_is_measured_ends_the_command(fake: FakeServer, capsys) -> None:
    fake.pause_s = 5
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    assert run(fake.url) == 130
    assert time.monotonic() - began < 4 and capsys.readouterr().out == ""


def test_mistakes_are_one_line(fake: FakeServer, tmp_path: Path, capsys) -> None:
    fake.wanted_key = "k"
    for arguments, message in [
        (("http://127.0.0.1:1",), "no server at http://127.0.0.1:1: Connection refused"),
        (("127.0.0.1:8000",), "is no URL of a server"),
        ((fake.url,), "wants an API key: --api-key"),
        ((fake.url, "--api-key", "k", "--model", "none"), "no model 'none'; it has tiny, other"),
        ((fake.url, "--prompts", "nothing"), "cannot read the prompts 'nothing'"),
        ((fake.url, "--json", str(tmp_path / "no" / "x.json")), "cannot write"),
    ]:
        assert run(*arguments) == 1
        error = capsys.readouterr().err
        assert error.startswith("paceline: ") and message in error and error.count("\n") == 1
    assert run(fake.url, "--api-key", "k", "--model", "other", "--num-requests", "1") == 0
    assert fake.bodies[-1]["model"] == "other"


@pytest.mark.parametrize(
    "arguments",
    [("--clients", "0"), ("--clients", "1,x"), ("--rate", "-1"), ("--rate", "1", "--clients", "1"),
     ("--extra-body", "[]"), ("--max-tokens", "0"), ("--temperature", "hot")],
)  # fmt: skip
def test_options_that_mean_nothing_are_refused(arguments: tuple[str, ...], capsys) -> None:
    with pytest.raises(SystemExit):
        run("http://127.0.0.1:1", *arguments)
    assert arguments[0].lstrip("-") in capsys.readouterr().err


def test_the_generator_is_light() -> None:

    code = (
        "import sys, deploy.bench.command; print({'torch', 'ray', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.stdout.strip() == "set()"


def test_defaults_follow_the_load() -> None:
    def loads(*arguments: str) -> list[command.Load]:
        options: argparse.Namespace = cli._parser().parse_args(["bench", "http://h", *arguments])
        return command._loads(options)

    assert loads() == [command.Load(8, 1, 1)]
    assert loads("--clients", "16") == [command.Load(64, 16, 16)]
    assert loads("--rate", "0.5") == [command.Load(32, 1, 1, 0.5)]
