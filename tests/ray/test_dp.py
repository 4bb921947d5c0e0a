"""Two data-parallel ranks under Serve: they agree on K and, where they share experts, step
together; one is killed, both are replaced, and nothing is lost.

Ranks that do not agree: tests/unit/parallel_dp/test_gang.py, with engines;
ranks that share experts, policy by policy: tests/unit/parallel/test_replicas.py, with processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
import yaml

from deploy.local import serving
from deploy.serve_file import read_serve_file
from tests.serve.conftest import free_port
from tests.tiny import EOS_ID, VOCAB_SIZE, byte_tokenizer, write_tiny_model
from tests.unit.model.conftest import write_family
from tests.unit.parallel.test_shard import MOE

pytestmark = pytest.mark.ray
with_experts = pytest.mark.parametrize("url", ["experts"], indirect=True)

# Alone a request drafts 4 tokens a step, beside another one on its rank 1.
TABLE = [[1, 1, 4], [2, 4, 1]]
PROMPT = "abcabcabcabcabcabc"


@pytest.fixture(scope="module", params=["experts", "nothing shared"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("dp"), free_port()
    shares_experts = request.param == "experts"
    if shares_experts:
        model = write_family(
            folder / "tiny", "mixtral", **MOE, vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID,
            bos_token_id=256,
        )  # fmt: skip
        byte_tokenizer().save_pretrained(model)
    else:
        model = write_tiny_model(folder / "tiny")
    args: dict[str, Any] = {
        "model": str(model),
        "served_model_name": "tiny",
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_num_queued_requests": 16,
        "num_threads": 1,
        "compile_layers": "off",
        "data_parallel_size": 2,
        "dynamic_k_dp_policy": "agree",
        "enable_expert_parallel": shares_experts,
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "num_speculative_tokens_per_batch_size": TABLE,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
    }
    app = {"name": "paceline", "import_path": "deploy.app:build", "route_prefix": "/", "args": args}
    http = {"host": "127.0.0.1", "port": port}
    path = folder / "serve.yaml"
    path.write_text(
        yaml.safe_dump({"proxy_location": "HeadOnly", "http_options": http, "applications": [app]})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        file = read_serve_file(path)
        with serving(file, None, lambda line: None):
            wait_for_ranks()  # the app is healthy as soon as one rank serves
            yield file.url


def complete(url: str, n: int, max_tokens: int = 150) -> str:
    body = {
        "model": "tiny", "prompt": PROMPT + str(n % 4), "max_tokens": max_tokens,
        "temperature": 0, "seed": n, "ignore_eos": True,
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=100)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["usage"]["completion_tokens"] == max_tokens
    return str(found["choices"][0]["text"])


def engines() -> set[int]:
    """Processes of the engine replicas."""
    children = psutil.Process().children(recursive=True)
    found = set()
    for child in children:
        with contextlib.suppress(psutil.Error):
            if "ServeReplica:paceline:Engine" in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


def _engine() -> Any:
    from ray import serve

    return serve.get_deployment_handle("Engine", "paceline")


def reports() -> list[dict[str, Any]]:
    return [answer.stats for answer in _results(_engine().broadcast("report"))]


def described() -> list[dict[str, Any]]:
    return [answer["data_parallel"] for answer in _results(_engine().broadcast("describe"))]


def wait_for_ranks(timeout_s: float = 90.0) -> list[dict[str, Any]]:
    """Facts of both ranks of one gang, once both are there."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            ranks = described()
        except Exception:  # replicas come and go
            ranks = []
        if sorted(f["rank"] for f in ranks) == [0, 1]:
            return ranks
        assert time.monotonic() < deadline, ranks
        time.sleep(0.2)


def _results(response: Any) -> list[Any]:
    return list(response.results(timeout_s=20))


@with_experts
def test_server_info_says_how_k_is_decided_and_where_the_experts_are(url: str) -> None:
    facts = httpx.get(f"{url}/server_info", timeout=20).json()["data_parallel"]
    assert facts["size"] == 2 and facts["dynamic_k_dp_policy"] == "agree"
    assert facts["k"] == "follows the largest batch among the ranks"
    assert facts["experts"] == "spread over 2 ranks; replicas step together"
    ranks = described()
    assert len({f["gang_id"] for f in ranks}) == 1


@with_experts
def test_ranks_agree_without_late_answers_and_keep_each_other_company(url: str) -> None:
    with ThreadPoolExecutor(5) as pool:
        texts = list(pool.map(lambda n: complete(url, n), range(10)))
    for n, text in enumerate(texts):
        assert text == texts[n % 4], "the same prompt, the same answer, on whichever rank"
    for n in range(4):
        assert complete(url, n) == texts[n], "one after the other, on both"
    stats = reports()
    assert all(s["dp_wait_s"]["count"] > 0 for s in stats), "both ranks served and asked"
    assert all(s["num_dp_fallbacks"] == 0 for s in stats)
    assert all(s["num_dp_dummy_steps"] > 0 for s in stats), "a rank without requests steps along"


@with_experts
def test_a_replica_that_hangs_costs_its_own_row_only(url: str) -> None:
    names = {answer.replica for answer in _results(_engine().broadcast("report"))}
    httpx.get(f"{url}/metrics", timeout=20)
    stopped = min(engines())
    os.kill(stopped, signal.SIGSTOP)
    try:
        health = httpx.get(f"{url}/health", timeout=20)
        page = httpx.get(f"{url}/metrics", timeout=20).text
        info = httpx.get(f"{url}/server_info", timeout=20)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert health.status_code == 200 and health.json()["healthy_replicas"] == 1
    assert "did not answer" in health.json()["reason"] and info.status_code == 200
    rows = [line for line in page.splitlines() if line.startswith("paceline_engine_healthy{")]
    assert sorted(row.rpartition(" ")[2] for row in rows) == ["0.0", "1.0"]
    assert all(any(name in row for row in rows) for name in names)
    assert page.count("paceline_running_requests{") == 1


def test_a_rank_killed_in_the_middle_loses_no_request_and_nothing_hangs(url: str) -> None:
    expected = [complete(url, n) for n in range(4)]
    before = engines()
    assert len(before) == 2
    one_is_done, killed = threading.Event(), threading.Event()

    def kill() -> None:
        assert one_is_done.wait(60), "nothing is served"
        os.kill(min(before), signal.SIGKILL)
        killed.set()

    def ask(n: int) -> str:
        text = complete(url, n)
        one_is_done.set()
        return text

    started = time.monotonic()
    with ThreadPoolExecutor(9) as pool:
        killer = pool.submit(kill)
        texts = list(pool.map(ask, range(16)))
        killer.result()
    assert killed.is_set() and time.monotonic() - started < 90
    assert [text == expected[n % 4] for n, text in enumerate(texts)] == [True] * 16
    # The whole gang was replaced: both processes are new and sit in one new gang.
    deadline = time.monotonic() + 60
    while len(engines() - before) < 2 or engines() & before:
        assert time.monotonic() < deadline, engines()
        time.sleep(0.2)
    ranks = wait_for_ranks()
    assert complete(url, 0) == expected[0]
    assert all(f["k"] == "follows the largest batch among the ranks" for f in ranks)
