"""The application on a cluster that runs already: several nodes, one machine. A node is lost under
streams, a version is replaced under requests, and no token is lost."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.schema import ServeDeploySchema

from deploy.client import Client
from deploy.local import serving
from deploy.serve_file import ServeFile, read_serve_file
from tests.serve.conftest import free_port
from tests.tiny import CONSTANT_K

pytestmark = pytest.mark.ray

ROOT = str(Path(__file__).parents[2])
PROMPT = [70, 71, 72, 73] * 8
LONG = {"max_tokens": 180, "temperature": 0.7, "ignore_eos": True}


def write_file(folder: Path, model: Path, port: int, **changes: Any) -> Path:
    args = {
        "model": str(model), "served_model_name": "tiny", "device": "cpu", "dtype": "float32",
        "max_model_len": 256, "max_num_seqs": 4, "num_threads": 1, "compile_layers": "off",
        "tensor_parallel_size": 2,
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1,
            "prompt_lookup_max": 3, **CONSTANT_K,
        },
        **changes,
    }  # fmt: skip
    app = {"name": "paceline", "route_prefix": "/", "import_path": "deploy.app:build", "args": args}
    # On the first node: its own loss would cut the front's connections.
    front = {"num_cpus": 0.05, "resources": {"head": 0.01}}
    app["deployments"] = [{"name": "Ingress", "ray_actor_options": front}]
    file = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [app],
    }
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(file))
    return path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes, each with room for one rank; the first has Serve's controller too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("PYTHONPATH", ROOT + os.pathsep + os.environ.get("PYTHONPATH", ""))
        common = {"object_store_memory": 80_000_000, "include_dashboard": False}
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "resources": {"head": 1.0}, **common},
        )
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=1, **common)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(scope="module")
def file(
    cluster: Cluster, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServeFile]:
    path = write_file(tmp_path_factory.mktemp("file"), tiny_pair[0], free_port())
    file = read_serve_file(path)
    with serving(file, cluster.address, print):
        yield file


def nodes_of(url: str, cluster: Cluster) -> list[Any]:
    """Nodes on which the replica's ranks are."""
    with httpx.Client(base_url=url, timeout=30) as http:
        info = http.get("/server_info").json()
    raylets = {
        psutil.Process(fact["pid"]).parent().pid  # type: ignore[union-attr]
        for fact in info["replica"]["actors"]
    }
    return [
        node
        for node in (cluster.head_node, *cluster.worker_nodes)
        if node.all_processes["raylet"][0].process.pid in raylets
    ]


def answers(url: str, num: int, at_token: Any = lambda n: None) -> list[tuple[int, ...]]:
    """Tokens of several streams at once; `at_token` hears how many there are so far."""
    lock, heard = threading.Lock(), 0

    def one(seed: int) -> tuple[int, ...]:
        nonlocal heard
        tokens: list[int] = []
        with Client(url, timeout_s=60) as client:
            for run in client.stream(PROMPT, seed=seed, **LONG):
                tokens += run.token_ids
                with lock:
                    heard += len(run.token_ids)
                    at_token(heard)
        return tuple(tokens)

    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(one, range(num)))


def test_streams_outlive_a_node(file: ServeFile, cluster: Cluster) -> None:
    expected = answers(file.url, 4)
    assert {len(tokens) for tokens in expected} == {180}
    used = nodes_of(file.url, cluster)
    assert len(used) == 2
    victim = next(node for node in cluster.worker_nodes if node in used)
    lost = threading.Event()

    def lose_node(num_tokens: int) -> None:
        if num_tokens > 60 and not lost.is_set():
            lost.set()
            threading.Thread(
                target=cluster.remove_node, args=(victim,), kwargs={"allow_graceful": False}
            ).start()

    assert answers(file.url, 4, lose_node) == expected
    assert lost.is_set()
    now = nodes_of(file.url, cluster)
    assert victim not in now and len(now) == 2


def test_a_redeploy_and_new_knobs_under_requests_lose_nothing(
    file: ServeFile, cluster: Cluster
) -> None:
    """`serve deploy` of the file with other knobs, then with other args, while streams run."""
    expected = answers(file.url, 3)
    with ThreadPoolExecutor(1) as pool:
        for change in ({"user_config": {"max_speculative_tokens": 1}}, {"max_num_seqs": 3}):
            config = copy.deepcopy(file.config)
            (app,) = config["applications"]
            if "user_config" in change:
                app["deployments"].append({"name": "Engine", **change})
            else:
                app["args"] |= change
            begun = threading.Event()
            streams = pool.submit(answers, file.url, 3, lambda n, begun=begun: begun.set())
            assert begun.wait(30)
            redeploy(config)
            assert streams.result(120) == expected
    wait_for_args(file.url, max_num_seqs=3)
    assert answers(file.url, 3) == expected


def redeploy(config: dict[str, Any]) -> None:
    """What `serve deploy` does."""
    schema = ServeDeploySchema.model_validate(config)
    serve.context._get_global_client().deploy_apps(schema)


def wait_for_args(url: str, max_num_seqs: int) -> None:
    deadline = time.monotonic() + 90
    while True:
        with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
            info = httpx.get(f"{url}/server_info", timeout=10).json()
            if info["config"]["scheduler"]["max_num_seqs"] == max_num_seqs:
                return
        assert time.monotonic() < deadline, f"the new version did not start: {serve.status()}"
        time.sleep(0.5)
