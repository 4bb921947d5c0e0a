"""`paceline serve` as a user runs it: progress, one clear line for a mistake, nothing left over."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serve.conftest import free_port, write_serve_file

ROOT = Path(__file__).parents[2]


def paceline(*arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that a script started in the background would hand down an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


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
def test_serve_until_interrupt_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    port = free_port()
    process = paceline(
        "serve", str(write_serve_file(tmp_path, tiny_model, 1)), "--port", str(port),
        env={"HOME": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None
    seen = []
    try:
        for line in process.stdout:
            seen.append(line)
            if line.startswith("Ready: "):
                break
        assert seen and seen[-1].startswith(f"Ready: http://127.0.0.1:{port}"), seen
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) > 3
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert "Traceback" not in err and "raylet" not in err
    _, alive = psutil.wait_procs(started, timeout=5)
    assert not alive
