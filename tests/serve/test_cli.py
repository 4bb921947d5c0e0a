"""`paceline serve` as a user runs it: progress, one clear line for a mistake, nothing left over."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serve.conftest import App, free_port, paceline, write_serve_file


def fails(*arguments: str, env: dict[str, str] | None = None) -> str:
    process = paceline(*arguments, env=env)
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


@pytest.mark.ray
def test_an_interrupt_ends_everything_that_serve_started(app: App) -> None:
    assert httpx.get(f"{app.url}/health").status_code == 200
    started = psutil.Process(app.process.pid).children(recursive=True)
    assert len(started) > 3
    app.process.send_signal(signal.SIGINT)
    out, err = app.process.communicate(timeout=60)
    assert app.process.returncode == 0, out + err
    assert "Traceback" not in err and "raylet" not in err
    _, alive = psutil.wait_procs(started, timeout=5)
    assert not alive
