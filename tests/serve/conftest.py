"""One private Ray with the tiny model served on it, for all tests of this folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import yaml

from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
MAX_MODEL_LEN = 512


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_serve_file(folder: Path, model: Path, port: int) -> Path:
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "paceline",
                "route_prefix": "/",
                "import_path": "deploy.app:build",
                "args": {
                    "model": str(model),
                    "served_model_name": "tiny",
                    "device": "cpu",
                    "dtype": "float32",
                    "max_num_seqs": 2,
                    "max_num_queued_requests": 1,
                    "num_threads": 1,
                    "compile_layers": "off",
                    "speculative_config": {
                        "method": "ngram",
                        "num_speculative_tokens": 4,
                        "prompt_lookup_min": 1,
                        "prompt_lookup_max": 3,
                    },
                },
            }
        ],
    }
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@dataclass
class App:
    process: subprocess.Popen[str]
    url: str

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        totals: dict[str, float] = {}
        for line in lines:
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                kept = ",".join(
                    part for part in name.partition("{")[2].rstrip("}").split(",")
                    if not part.startswith("replica=")
                )  # fmt: skip
                key = name.partition("{")[0] + (f"{{{kept}}}" if kept else "")
                totals[key] = totals.get(key, 0.0) + float(value)
        return totals


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


@pytest.fixture(scope="package")
def app(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """`paceline serve` as a user starts it. The last test of the folder interrupts it."""
    folder, port = tmp_path_factory.mktemp("serve"), free_port()
    path = write_serve_file(folder, tiny_model, 1)
    # A home of its own: Ray keeps its token there.
    process = paceline("serve", str(path), "--port", str(port), env={"HOME": str(folder)})
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("Ready: "):
                break
        url = f"http://127.0.0.1:{port}"
        assert lines and lines[-1].startswith(f"Ready: {url}"), lines
        yield App(process, url)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


@pytest.fixture(scope="module")
def handles(app: App) -> Iterator[None]:
    """This process as another driver of the Ray that `paceline serve` started."""
    import ray

    (address,) = {
        part.partition("=")[2]
        for child in psutil.Process(app.process.pid).children(recursive=True)
        for part in child.cmdline()
        if part.startswith("--gcs-address=")
    }
    ray.init(
        address=address,
        namespace="serve",
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address=address.partition(":")[0],
    )
    try:
        yield
    finally:
        ray.shutdown()
