"""The guides' code runs as it stands, against a running server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import ROOT, App

pytestmark = pytest.mark.ray

GUIDES = ROOT / "docs" / "guides"


def blocks(guide: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (GUIDES / guide).read_text(), re.DOTALL)


def here(code: str, app: App, model: Path) -> str:
    ports = {":8000": app.url.rpartition("/")[2].partition(":")[2], ":9000": str(app.grpc_port)}
    for port, ours in ports.items():
        code = code.replace(port, f":{ours}")
    return code.replace(
        '"MODEL", max_model_len=2048', f'"{model}", max_model_len=256, compile_layers="off"'
    )


def said_by(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_serve_file_of_the_grpc_guide_is_the_one_that_is_tested() -> None:
    (yaml,) = blocks("grpc.md", "yaml")
    assert "grpc_servicer_functions: [deploy.grpc.add_to_server]" in yaml


def test_the_grpc_guide(app: App, tiny_model: Path) -> None:
    (code,) = blocks("grpc.md", "python")
    assert len(said_by(here(code, app, tiny_model))) > 20


def test_the_python_guide(app: App, tiny_model: Path) -> None:
    over_http, _, offline = blocks("python.md", "python")
    assert "token" not in said_by(here(over_http, app, tiny_model))
    assert len(said_by(here(offline, app, tiny_model))) > 1


def test_another_deployment_calls_ours(app: App, connected: None) -> None:
    _, composition, _ = blocks("python.md", "python")
    from ray import serve

    namespace: dict[str, Any] = {}
    exec(composition, namespace)
    summary: Any = namespace["Summary"]
    few = summary.options(ray_actor_options={"num_cpus": 0.1})
    serve.run(few.bind(), name="summary", route_prefix="/summary")
    try:
        answer = httpx.post(f"{app.url}/summary", content="the cat sat", timeout=60)
        assert answer.status_code == 200 and len(answer.text) > 1
    finally:
        serve.delete("summary")
