"""`paceline serve` as a user runs it: progress, one clear line for a mistake, nothing left over."""

from __future__ import annotations

import fcntl
import json
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.serve.conftest import App, free_port, paceline, write_serve_file


def fails(*arguments: str) -> str:
    process = paceline(*arguments, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, out + err
    assert len(err.strip().splitlines()) == 1 and err.startswith("paceline: "), err
    return err


def test_a_port_in_use_names_the_port_and_the_flag(tiny_model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = fails("serve", str(write_serve_file(tmp_path, tiny_model, port)))
    assert str(port) in message and "--port" in message


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    file = write_serve_file(tmp_path, tmp_path / "nothing", free_port())
    assert str(tmp_path / "nothing") in fails("serve", str(file))


def test_a_misspelt_argument_is_named(tiny_model: Path, tmp_path: Path) -> None:
    file = write_serve_file(tmp_path, tiny_model, free_port())
    file.write_text(file.read_text().replace("max_num_seqs", "max_num_seq"))
    message = fails("serve", str(file))
    assert "max_num_seq" in message and "max_num_seqs" in message


def test_a_missing_file_and_a_file_that_is_no_config(tmp_path: Path) -> None:
    assert "cannot read" in fails("serve", str(tmp_path / "none.yaml"))
    (tmp_path / "x.yaml").write_text("a: 1")
    assert "applications" in fails("serve", str(tmp_path / "x.yaml"))


def test_chat_without_a_server() -> None:
    assert "no server" in fails("chat", "--url", f"http://127.0.0.1:{free_port()}")


def is_ownerless(folder: Path) -> bool:
    with (folder / "owner").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def left_behind() -> list[Path]:
    """Folders of ours whose process is gone: other servers may run on this machine."""
    return [
        folder for kind in ("pl-*", "paceline-*") for folder in Path("/tmp").glob(kind)
        if (folder / "owner").exists() and is_ownerless(folder)
    ]  # fmt: skip


@pytest.mark.ray
def test_an_interrupt_while_ray_starts_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    file = write_serve_file(tmp_path, tiny_model, free_port())
    process = paceline("serve", str(file), stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "Starting Ray\n"
    # Until Ray has a child process: the start is under way.
    while not (started := psutil.Process(process.pid).children(recursive=True)):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, ""), out
    assert "Stopping" in out
    _, alive = psutil.wait_procs(started, timeout=5)
    assert not alive
    assert not left_behind()


@pytest.mark.ray
def test_the_benchmark_agrees_with_the_servers_own_counters(app: App, tmp_path: Path) -> None:
    before = app.metrics()
    out = tmp_path / "out.json"
    options = ("--clients", "1,2", "--num-requests", "4", "--max-tokens", "12", "--json", str(out))
    process = paceline("bench", app.url, *options, stderr=subprocess.PIPE)
    said, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, ""), said
    document = json.loads(out.read_text())
    assert document["model"] == "tiny" and document["ignore_eos"] and document["has_usage"]
    runs = document["runs"]
    assert [(r["num_completed"], r["output_tokens"]) for r in runs] == [(4, 48), (4, 48)]
    assert all(r["client_cpu_share"] < 0.5 for r in runs)
    after = app.metrics()
    made = after["paceline_output_tokens_total"] - before.get("paceline_output_tokens_total", 0)
    # And the warm-up's: one answer, then two; before them one of two tokens.
    assert made == 96 + 3 * 12 + 2
    drafted = sum(r["speculation"]["num_draft_tokens"] for r in runs)
    assert 0 < drafted <= after["paceline_draft_tokens_total"]


@pytest.mark.ray
def test_one_proxy_stands_in_front(app: App) -> None:
    started = psutil.Process(app.process.pid).children(recursive=True)
    assert any(p.name() == "haproxy" for p in started) == (app.proxy == "haproxy")
    if app.proxy == "haproxy":
        assert app.http().get("/-/healthz").status_code == 200


def test_a_service_managers_stop_ends_the_server_and_leaves_nothing(app: App) -> None:
    """The last test of the folder: it ends the server of the others."""
    assert app.said[-1].startswith(f"Ready: {app.url}")
    started = psutil.Process(app.process.pid).children(recursive=True)
    assert len(started) > 3
    body = {"model": "tiny", "prompt": [5] * 8, "stream": True, "max_tokens": 400}
    body |= {"ignore_eos": True}
    with app.http().stream("POST", "/v1/completions", json=body) as answer:
        events = answer.iter_lines()
        next(events)
        app.process.send_signal(signal.SIGTERM)
        assert [line for line in events if line][-1] == "data: [DONE]", "an answer was cut"
    out, _ = app.process.communicate(timeout=60)
    errors = app.errors.read_text()
    assert app.process.returncode == 0, out + errors
    assert "Traceback" not in errors and "raylet" not in errors and "SIG" not in errors
    _, alive = psutil.wait_procs(started, timeout=5)
    assert not alive
    assert not left_behind()
