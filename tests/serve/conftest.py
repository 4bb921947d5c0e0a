"""One private Ray with the tiny model served on it, for all tests of this folder."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from deploy.local import serving
from deploy.serve_file import ServeFile, read_serve_file
from tests.tiny import write_tiny_model

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
    file: ServeFile
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


@pytest.fixture(scope="package")
def app(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("serve")
    # A home of its own: Ray keeps its token there.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        file = read_serve_file(write_serve_file(folder, tiny_model, free_port()))
        lines: list[str] = []
        with serving(file, None, lines.append):
            yield App(file, file.url)
