"""The whole application on a real Ray: HTTP through Serve's proxy, a real (tiny) model behind."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Timer
from typing import Any

import grpc
import httpx
import openai
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from deploy.client import Client
from deploy.grpc import paceline_pb2 as pb
from deploy.grpc import paceline_pb2_grpc
from specconfig import acceptance, registry
from tests.serve.conftest import PLUGIN, App
from tests.tiny import CONSTANT_K

pytestmark = pytest.mark.ray

MESSAGES: Any = [{"role": "user", "content": "abcabcabcabc"}]
GREEDY = {"temperature": 0, "max_tokens": 40, "extra_body": {"ignore_eos": True}}


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def is_idle(app: App) -> bool:
    page = app.metrics()
    return (
        page["paceline_running_requests"] == 0
        and page["paceline_waiting_requests"] == 0
        and page['paceline_kv_blocks{state="used"}'] == 0
    )


def complete(app: App, **fields: Any) -> httpx.Response:
    body = {"prompt": "abcabcabc", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    with app.http() as http:
        return http.post("/v1/completions", json={**body, **fields})


def test_the_openai_client_gets_the_same_answer_whole_and_streamed(app: App) -> None:
    client = app.openai()
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 5
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 40


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 5}])
def test_speculation_changes_speed_never_output(app: App, sampling: dict[str, Any]) -> None:
    shown = {"logprobs": 2, "return_token_ids": True, "max_tokens": 64, **sampling}
    fast = complete(app, **shown).json()
    plain = complete(app, **shown, speculation={"enabled": False}).json()
    capped = complete(app, **shown, speculation={"num_speculative_tokens": 1}).json()
    for other in (plain, capped):
        for key in ("text", "token_ids", "logprobs", "finish_reason"):
            assert other["choices"][0][key] == fast["choices"][0][key]
    assert plain["usage"]["speculation"]["num_draft_tokens"] == 0
    if sampling["temperature"] == 0:
        assert fast["usage"]["speculation"]["num_accepted_tokens"] > 0
        assert (
            sum(fast["choices"][0]["accepted"])
            == fast["usage"]["speculation"]["num_accepted_tokens"]
        )


def test_usage_metrics_and_tokens_agree(app: App) -> None:
    before = app.metrics()
    body = complete(app, max_tokens=30, return_token_ids=True, logprobs=0).json()
    after = app.metrics()
    choice, usage = body["choices"][0], body["usage"]
    gained = {key: after[key] - before.get(key, 0.0) for key in after}
    assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == 30
    assert usage["completion_tokens"] == gained["paceline_output_tokens_total"] == 30
    assert usage["prompt_tokens"] == gained["paceline_prompt_tokens_total"] == 9
    assert gained['paceline_requests_total{finish_reason="length"}'] == 1
    speculation = usage["speculation"]
    assert gained["paceline_drafts_total"] == speculation["num_drafts"]
    assert gained["paceline_accepted_tokens_total"] == speculation["num_accepted_tokens"]


def test_errors_come_through_the_proxy_as_openai_errors(app: App) -> None:
    client = app.openai()
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=MESSAGES, n=2)
    assert bad.value.param == "n"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x" * 600)
    assert "600" in str(bad.value) and "512" in str(bad.value)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with app.http() as http:
        answer = http.get("/nowhere")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "route_not_found"


def test_a_client_that_leaves_frees_its_kv(app: App) -> None:
    assert wait_until(lambda: is_idle(app), 10)
    aborted = app.metrics().get('paceline_requests_total{finish_reason="abort"}', 0.0)
    stream = app.openai().chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        stream=True,
        max_tokens=480,
        extra_body={"ignore_eos": True, "speculation": {"enabled": False}},
    )
    next(iter(stream))
    stream.close()
    assert wait_until(lambda: is_idle(app), 5)
    assert app.metrics()['paceline_requests_total{finish_reason="abort"}'] == aborted + 1


def test_a_full_queue_is_429_and_the_others_are_served(app: App) -> None:
    def one(_: int) -> httpx.Response:
        return complete(app, max_tokens=100, speculation={"enabled": False})

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(one, range(12)))
    statuses = {answer.status_code for answer in answers}
    assert statuses == {200, 429}, statuses
    assert sum(answer.status_code == 200 for answer in answers) >= 3
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        else:
            assert answer.json()["usage"]["completion_tokens"] == 100
    assert wait_until(lambda: is_idle(app), 10)


def test_server_info_health_and_models_show_the_served_model(app: App) -> None:
    with app.http() as http:
        info = http.get("/server_info").json()
        assert info["lossless"] is True
        assert info["served"]["num_speculative_tokens"] == 4
        assert info["config"]["speculative"]["method"] == "ngram"
        assert http.get("/health").json()["status"] == "ok"
        assert http.get("/v1/models/tiny").json()["max_model_len"] == 512


def test_neither_verifier_nor_ingress_maps_torch(app: App) -> None:
    replicas = [
        process
        for process in psutil.Process(app.process.pid).children(recursive=True)
        if "ServeReplica:paceline" in " ".join(process.cmdline())
    ]
    assert len(replicas) == 2
    for process in replicas:
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()


def test_methods_from_outside_the_package_are_served(
    app: App, connected: None, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import serve

    from deploy.app import build
    from specconfig.app_args import AppArgs
    from specconfig.registry import registered_speculative_methods

    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setattr(registry, "_load_entry_points", registry._load_entry_points.__wrapped__)
    monkeypatch.setattr(acceptance, "_load_entry_points", acceptance._load_entry_points.__wrapped__)
    assert "toy_states" in registered_speculative_methods()
    args = AppArgs(
        model=str(tiny_model), served_model_name="toy", device="cpu", dtype="float32",
        max_num_seqs=2, num_threads=1, compile_layers="off", num_ingress_replicas=1,
        speculative_config={
            "method": "toy_states", "num_speculative_tokens": 3,
            "rejection_sample_method": "toy_half", **CONSTANT_K,
        },
    )  # fmt: skip
    serve.run(build(args), name="toy", route_prefix="/toy")
    try:
        body = {"prompt": "abcabcabc", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        with app.http() as http:
            got = http.post("/toy/v1/completions", json=body).json()
            info = http.get("/toy/server_info").json()
        plain = complete(app, max_tokens=60, speculation={"enabled": False}).json()
        assert got["choices"][0]["text"] == plain["choices"][0]["text"]
        counts = got["usage"]["speculation"]
        assert 0 < counts["num_accepted_tokens"] < counts["num_draft_tokens"]
        assert info["lossless"] is True
        assert info["config"]["speculative"]["rejection_sample_method"] == "toy_half"
    finally:
        serve.delete("toy")
        with app.http() as http:  # the proxy is told of it a moment later
            assert wait_until(lambda: http.get("/toy/server_info").status_code == 404, 10)


@pytest.mark.parametrize("speculates", [True, False])
def test_every_way_in_gives_the_same_answer(app: App, connected: None, speculates: bool) -> None:
    """The openai client, curl, a generated stub, and our client over its three ways."""
    fields = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    beyond = {
        "ignore_eos": True, "return_token_ids": True, "speculation": {"enabled": speculates},
    }  # fmt: skip
    by_openai = app.openai().completions.create(
        model="tiny", prompt="abcabcabc", max_tokens=24, temperature=0.8, seed=3, extra_body=beyond
    )
    choice = by_openai.choices[0]
    expected = (choice.text, tuple(choice.model_extra["token_ids"]))
    assert (by_openai.usage.model_extra["speculation"]["num_drafts"] > 0) == speculates

    body = {"prompt": "abcabcabc", **fields, **beyond}
    curl = subprocess.run(
        ["curl", "-sS", f"{app.url}/v1/completions", "-H", "Content-Type: application/json",
         "-d", json.dumps(body)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    by_curl = json.loads(curl.stdout)["choices"][0]
    assert (by_curl["text"], tuple(by_curl["token_ids"])) == expected

    sampling = pb.Sampling(**fields, speculation_enabled=speculates)
    with grpc.insecure_channel(f"127.0.0.1:{app.grpc_port}") as channel:
        stub = paceline_pb2_grpc.PacelineStub(channel)
        asked = pb.GenerateRequest(text="abcabcabc", model="tiny", sampling=sampling)
        by_stub, call = stub.Generate.with_call(asked)
        parts = list(stub.GenerateStream(asked))
    assert (by_stub.text, tuple(by_stub.token_ids)) == expected
    assert "".join(part.text for part in parts) == expected[0]
    trailer = dict(call.trailing_metadata())
    assert trailer["paceline-finish-reason"] == "length" and trailer["request_id"]
    counts = by_stub.usage.speculation
    assert trailer["paceline-acceptance-length"] == f"{counts.acceptance_length:.4f}"
    assert (counts.num_drafts > 0) == speculates

    for target in ("paceline", app.url, f"grpc://127.0.0.1:{app.grpc_port}"):
        with Client(target) as client:
            whole = client.generate("abcabcabc", **fields, speculation_enabled=speculates)
            assert (whole.text, whole.token_ids) == expected, target
            assert (whole.speculation.num_drafts > 0) == speculates
            chat = client.chat(MESSAGES, **fields)
            assert len(chat.token_ids) == 24
            batch = client.generate_batch(["abcabcabc"] * 3, **fields, progress=False)
            assert [run.token_ids for run in batch] == [expected[1]] * 3
            with client.stream("abc", max_tokens=400, ignore_eos=True) as runs:
                next(runs)
            assert wait_until(lambda: is_idle(app), 5), f"{target}: leaving frees the KV"


def test_grpc_says_what_is_wrong_and_ends_with_its_deadline(app: App) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{app.grpc_port}") as channel:
        stub = paceline_pb2_grpc.PacelineStub(channel)
        (model,) = stub.ListModels(pb.ListModelsRequest()).models
        assert (model.id, model.num_speculative_tokens) == ("tiny", 4)
        info = stub.GetServerInfo(pb.GetServerInfoRequest()).info
        assert info["served"]["name"] == "tiny" and info["lossless"] is True
        health = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        assert health.Check(health_pb2.HealthCheckRequest()).status == serving
        assert next(health.Watch(health_pb2.HealthCheckRequest())).status == serving

        hot = pb.GenerateRequest(text="a", sampling=pb.Sampling(temperature=-1))
        other = pb.GenerateRequest(text="a", model="another")
        for call in (stub.Generate, lambda request: list(stub.GenerateStream(request))):
            for request, code, words in (
                (hot, grpc.StatusCode.INVALID_ARGUMENT, "'temperature' is -1.0"),
                (other, grpc.StatusCode.NOT_FOUND, "another"),
                (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "'text' or 'token_ids'"),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    call(request)
                assert caught.value.code() == code and words in caught.value.details()

        long = pb.GenerateRequest(text="abc", sampling=pb.Sampling(max_tokens=450, ignore_eos=True))
        for call in (stub.Generate, lambda request, timeout: list(stub.GenerateStream(
            request, timeout=timeout
        ))):  # fmt: skip
            with pytest.raises(grpc.RpcError) as caught:
                call(long, timeout=0.2)
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert wait_until(lambda: is_idle(app), 5)

        reflected = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert {"paceline.v1.Paceline", "grpc.health.v1.Health"} <= set(reflected)


def test_runtime_knobs_change_speculation_at_once(app: App, connected: None) -> None:
    from ray import serve

    engine = serve.get_deployment_handle("Engine", "paceline")

    def set_knobs(knobs: dict[str, Any]) -> None:
        engine.broadcast("reconfigure", knobs).results(timeout_s=10)

    set_knobs({"speculation_enabled": False})
    assert app.metrics()["paceline_speculation_enabled"] == 0
    assert complete(app).json()["usage"]["speculation"]["num_drafts"] == 0
    set_knobs({"max_speculative_tokens": 1})
    per_pos = complete(app).json()["usage"]["speculation"]["num_accepted_tokens_per_pos"]
    assert len(per_pos) <= 1
    for wrong, word in (({"speculation": True}, "speculation"),
                        ({"max_speculative_tokens": 9}, "max_speculative_tokens")):  # fmt: skip
        set_knobs(wrong)  # a running engine keeps what it has, and says why
        with app.http() as http:
            assert word in http.get("/server_info").json()["user_config"]["refused"]
        assert app.metrics()["paceline_user_config_refused"] == 1
        assert len(complete(app).json()["usage"]["speculation"]["num_accepted_tokens_per_pos"]) <= 1
    set_knobs({})
    assert app.metrics()["paceline_user_config_refused"] == 0
    assert complete(app).json()["usage"]["speculation"]["num_drafts"] > 0


def pids(app: App) -> dict[str, int]:
    with app.http() as http:
        info = http.get("/server_info").json()
    (target,) = info["replica"]["actors"]
    return {"target": target["pid"], "verifier": info["verifier_pid"]}


@pytest.mark.parametrize("victim", ["target", "verifier"])
def test_a_stream_survives_the_death_of_its_engine(app: App, victim: str) -> None:
    """A process is killed mid-stream: nothing is lost or repeated, and Serve heals."""
    fields = {
        "model": "tiny",
        "prompt": "abcabcabc",
        "max_tokens": 450,
        "temperature": 0.7,
        "seed": 11,
        "extra_body": {
            "ignore_eos": True, "return_token_ids": True, "speculation": {"enabled": False},
        },
    }  # fmt: skip
    client = app.openai()
    whole = client.completions.create(**fields)
    old = pids(app)
    timer = Timer(0.3, psutil.Process(old[victim]).kill)
    states: list[int] = []
    done = Event()

    def watch_health() -> None:
        while not done.wait(0.1):
            states.append(httpx.get(f"{app.url}/health", timeout=10).status_code)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch_health)
        tokens: list[int] = []
        text = ""
        try:
            for number, chunk in enumerate(client.completions.create(stream=True, **fields)):
                if number == 0:
                    timer.start()
                tokens += getattr(chunk.choices[0], "token_ids", None) or []
                text += chunk.choices[0].text
        finally:
            done.set()
        watching.result()
    timer.join()
    assert tokens == whole.choices[0].token_ids
    assert text == whole.choices[0].text
    assert 503 in states and states[0] == 200
    assert wait_until(lambda: not any(map(psutil.pid_exists, old.values())), 10)
    assert set(pids(app).values()).isdisjoint(old.values())
    with app.http() as http:
        assert http.get("/health").status_code == 200
