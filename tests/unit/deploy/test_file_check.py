"""One check for `explain` and `paceline serve`, held against Ray Serve's own schema and deploy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from ray.serve import config as serve_config
from ray.serve import schema
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.build_app import build_app
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.schema import ServeDeploySchema

from deploy import before_start
from deploy.app import build
from deploy.errors import UserError
from deploy.serve_file import bundles_of, read_serve_file
from specconfig.app_args import ENGINE, INGRESS, AppArgs
from specconfig.explaining import serve_schema
from specconfig.explaining.explain import explain_file
from tests.tiny import write_tiny_config

GOOD = """\
proxy_location: HeadOnly
http_options: {{host: 127.0.0.1, port: 8000}}
applications:
- name: paceline
  route_prefix: /
  import_path: deploy.app:build
  args:
    model: {model}
    device: cpu
    speculative_config: {{method: ngram, num_speculative_tokens: 4}}
"""
ENGINE_PART = "  deployments:\n  - name: Engine\n    "
INGRESS_PART = "  deployments:\n  - name: Ingress\n    "
SECOND = """\
- name: {name}
  route_prefix: {prefix}
  import_path: deploy.app:build
  args: {args}
"""

SCHEMA, DEPLOY, DROPPED, OURS = "schema", "deploy", "dropped", "ours"
# (replaced, by; or appended), line, end of the field's path, text of the fix, who refuses or drops
BROKEN: list[tuple[str, str, int, str, str, str]] = [
    ("", "  deployments:\n  - name: engine\n", 12, "name", "'Engine'", DEPLOY),
    ("", "  deployments:\n  - {{num_replicas: 1}}\n", 12, "name", "add name", SCHEMA),
    ("", "  deployments: Engine\n", 11, "deployments", "- ", SCHEMA),
    ("", "  runtime_env: {{working_dir: .}}\n", 11, "working_dir", "URI", SCHEMA),
    ("", "  runtime_env: {{py_modules: [/code]}}\n", 11, "py_modules.0", "URI", SCHEMA),
    ("", ENGINE_PART + "ray_actor_options: {{num_cpus: 0.1, runtime_env: {{working_dir: /a}}}}\n",
     13, "working_dir", "URI", SCHEMA),
    ("", ENGINE_PART + "autoscaling_config: {{target_num_ongoing_requests_per_replica: 2}}\n",
     13, "target_num_ongoing_requests_per_replica", "target_ongoing_requests", DROPPED),
    ("", ENGINE_PART + "autoscaling_config: {{min_replicas: 3}}\n", 13, "min_replicas", "", DEPLOY),
    ("", ENGINE_PART + "num_replicas: 2\n    autoscaling_config: {{max_replicas: 3}}\n",
     13, "num_replicas", "one of the two", SCHEMA),
    ("", ENGINE_PART + "num_replicas: many\n", 13, "num_replicas", "", SCHEMA),
    ("", ENGINE_PART + "num_replica: 2\n", 13, "num_replica", "num_replicas", DROPPED),
    ("", ENGINE_PART + "ray_actor_options: {{num_cpus: 4}}\n", 13, "num_cpus", "0.1", DEPLOY),
    ("", ENGINE_PART + "ray_actor_options: {{num_gpus: 1}}\n", 13, "num_gpus", "remove", DEPLOY),
    ("", ENGINE_PART + "ray_actor_options: {{memory: 1}}\n", 13, "num_cpus", "0.1", DEPLOY),
    ("", ENGINE_PART + "max_replicas_per_node: 1\n", 13, "max_replicas_per_node", "", DEPLOY),
    ("", ENGINE_PART + "placement_group_bundles: [{{CPU: 0.2}}]\n",
     13, "placement_group_bundles", "remove", OURS),
    ("", ENGINE_PART + "placement_group_strategy: TIGHT\n", 13, "placement_group_strategy", "",
     DEPLOY),
    ("", ENGINE_PART + "gang_scheduling_config: {{gang_size: 2}}\n", 13, "gang_size", "", DEPLOY),
    ("", ENGINE_PART + "max_queued_requests: 0\n", 13, "max_queued_requests", "", SCHEMA),
    ("", ENGINE_PART + "max_ongoing_requests: null\n", 13, "max_ongoing_requests", "", SCHEMA),
    ("", ENGINE_PART + "logging_config: {{log_level: LOUD}}\n", 13, "log_level", "", SCHEMA),
    ("", ENGINE_PART + "backpressure_config: {{status_code: 500}}\n", 13, "status_code", "",
     SCHEMA),
    ("", ENGINE_PART + "user_config: {{speculation_enable: false}}\n",
     13, "speculation_enable", "speculation_enabled", OURS),
    ("", ENGINE_PART + "user_config: {{max_speculative_tokens: 9}}\n",
     13, "max_speculative_tokens", "4 or less", OURS),
    ("", INGRESS_PART + "user_config: {{speculation_enabled: false}}\n",
     13, "user_config", "Engine", OURS),
    ("deploy.app:build", "deploy.app.build", 6, "import_path", "deploy.app:build", OURS),
    ("deploy.app:build", "deploy.app:bild", 6, "import_path", "deploy.app:build", OURS),
    ("deploy.app:build", "no_such_package:app", 6, "import_path", "install", OURS),
    ("deploy.app:build", "json", 6, "import_path", "colon", SCHEMA),
    ("route_prefix: /", "route_prefix: llm", 5, "route_prefix", "/llm", SCHEMA),
    ("route_prefix: /", "route_prefix: /llm/", 5, "route_prefix", "/llm", SCHEMA),
    ("route_prefix: /", "route_prefx: /llm", 5, "route_prefx", "route_prefix", DROPPED),
    ("name: paceline", "name: ''", 4, "name", "", SCHEMA),
    ("", SECOND.format(name="paceline", prefix="/b", args="{{model: '{model}'}}"), 11, "name",
     "another name", SCHEMA),
    ("", SECOND.format(name="b", prefix="/", args="{{model: '{model}'}}"), 12, "route_prefix",
     "another route_prefix", SCHEMA),
    ("", "  port: 9000\n", 11, "port", "http_options", SCHEMA),
    ("http_options", "htp_options", 2, "htp_options", "http_options", DROPPED),
    ("http_options: {{host: 127.0.0.1, port: 8000}}", "http_options: x", 2, "http_options", "key",
     SCHEMA),
    ("port: 8000", "port: abc", 2, "port", "", SCHEMA),
    ("port: 8000", "port: 84140", 2, "port", "", OURS),
    ("port: 8000", "ssl_keyfile: a", 2, "ssl_keyfile", "other", DEPLOY),
    ("port: 8000", "hots: a", 2, "hots", "host", DROPPED),
    ("HeadOnly", "Head", 1, "proxy_location", "", SCHEMA),
    ("", "target_capacity: 101\n", 11, "target_capacity", "", SCHEMA),
    ("", "tracing_config: {{sampling_ratio: 2}}\n", 11, "sampling_ratio", "", SCHEMA),
    ("", "controller_options: {{runtime_env: {{pip: [a]}}}}\n", 11, "pip", "", SCHEMA),
    ("", "grpc_options: {{port: 0}}\n", 11, "port", "", OURS),
    ("", "7: x\n", 11, "7", "", OURS),
    ("", SECOND.format(name="b", prefix="/b", args="[1, 2]"), 14, "args", "key", SCHEMA),
    ("", SECOND.format(name="b", prefix="/b", args="x"), 14, "args", "key", SCHEMA),
    ("", "    api_keys: X\n", 11, "api_keys", "api_keys_env", DEPLOY),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_config(tmp_path_factory.mktemp("file") / "m")


def written(folder: Path, text: str, model: Path) -> Path:
    path = folder / "serve.yaml"
    path.write_text(text.format(model=model))
    return path


def deploys(data: dict[str, Any]) -> ServeDeploySchema:
    """The file through Serve's schema, our builder and Serve's deploy step; raises as they do."""
    checked = ServeDeploySchema.model_validate(data)
    serve_config.HTTPOptions(**checked.http_options.model_dump())
    for app in checked.applications:
        built = build_app(
            build(AppArgs(**app.args)), name=app.name, make_deployment_handle=lambda *_: None
        )
        infos = {
            one.name: DeploymentInfo(
                deployment_config=one._deployment_config,
                replica_config=one._replica_config,
                start_time_ms=0,
                deployer_job_id="",
            )
            for one in built.deployments
        }
        override_deployment_info(infos, app)
    return checked


def test_a_good_file_passes_everywhere(tmp_path: Path, model: Path) -> None:
    path = written(tmp_path, GOOD, model)
    deploys(yaml.safe_load(path.read_text()))
    explanation = explain_file(path, bundles=bundles_of)
    assert explanation.can_start, explanation.problems
    assert read_serve_file(path).url == "http://127.0.0.1:8000"


FULL = """\
  runtime_env: {{working_dir: 'https://host/code.zip', env_vars: {{A: b}}}}
  deployments:
  - name: Engine
    num_replicas: auto
    autoscaling_config: {{min_replicas: 1, max_replicas: 4, aggregation_function: MAX}}
    user_config: {{max_speculative_tokens: 4}}
    ray_actor_options: {{num_cpus: 0.1}}
    placement_group_bundles: [{{CPU: 2}}]
    max_queued_requests: -1
    logging_config: {{log_level: DEBUG, additional_log_standard_attrs: [name]}}
  - name: Ingress
    num_replicas: 2
    max_replicas_per_node: 1
    ray_actor_options: {{num_cpus: 1}}
"""


def test_what_serve_takes_is_not_refused(tmp_path: Path, model: Path) -> None:
    path = written(tmp_path, GOOD + FULL, model)
    deploys(yaml.safe_load(path.read_text()))
    assert explain_file(path, bundles=bundles_of).problems == ()


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "fix", "by"),
    BROKEN,
    ids=[row[1].strip()[-40:] for row in BROKEN],
)
def test_what_would_be_refused_or_dropped_is_said_first(
    tmp_path: Path, model: Path, old: str, new: str, line: int, field: str, fix: str, by: str
) -> None:
    path = written(tmp_path, GOOD.replace(old, new) if old else GOOD + new, model)
    data = yaml.safe_load(path.read_text())
    if by in (SCHEMA, DEPLOY):
        with pytest.raises((ValueError, TypeError)):
            deploys(data)
        if by == DEPLOY:
            ServeDeploySchema.model_validate(data)
    elif by == DROPPED:
        taken = ServeDeploySchema.model_validate(data)
        for one in taken.applications[0].deployments:
            if isinstance(one.autoscaling_config, dict):
                # Kept as written until the deploy step makes this of it.
                one.autoscaling_config = serve_config.AutoscalingConfig(**one.autoscaling_config)
        assert f"'{field}'" not in str(taken.model_dump(warnings=False))
    explanation = explain_file(path, bundles=bundles_of)
    assert not explanation.can_start
    found = [one for one in explanation.problems if one.line == line and one.field.endswith(field)]
    assert found, explanation.problems
    assert fix in found[0].fix or fix in found[0].message
    with pytest.raises(UserError) as refused:
        read_serve_file(path, port=8001)
    assert f"{path}:" in str(refused.value) and "\n" not in str(refused.value)


PAIRS = [
    (serve_schema.File, schema.ServeDeploySchema, set()),
    (serve_schema.Application, schema.ServeApplicationSchema, {"host", "port"}),
    (serve_schema.Deployment, schema.DeploymentSchema, set()),
    (serve_schema.Http, schema.HTTPOptionsSchema, set()),
    (serve_schema.Grpc, schema.gRPCOptionsSchema, set()),
    (serve_schema.Logging, schema.LoggingConfig, set()),
    (serve_schema.Tracing, schema.TracingConfig, set()),
    (serve_schema.ActorOptions, schema.RayActorOptionsSchema, set()),
    (serve_schema.Controller, serve_config.ControllerOptions, set()),
    (serve_schema.Backpressure, serve_config.BackpressureConfig, set()),
    (serve_schema.Autoscaling, serve_config.AutoscalingConfig, set()),
    (serve_schema.Policy, serve_config.AutoscalingPolicy, set()),
    (serve_schema.Router, serve_config.RequestRouterConfig, set()),
    (serve_schema.Gang, serve_config.GangSchedulingConfig, set()),
    (serve_schema.DeploymentActor, serve_config.DeploymentActorConfig, set()),
]


def _name(one: object) -> str:
    return getattr(one, "__name__", "")  # not of a set: its order is another in each process


@pytest.mark.parametrize(("ours", "theirs", "left_out"), PAIRS, ids=_name)
def test_known_keys_are_rays(
    ours: type[BaseModel], theirs: type[BaseModel], left_out: set[str]
) -> None:
    assert set(ours.model_fields) == set(theirs.model_fields) - left_out


# A value of each type that a field may or may not take; what Serve refuses of it, we refuse.
PROBES = [None, "x", -1, 0, 1, 2, 0.5, 1e9, True, [], [1], {}, {"a": 1}, "1", "auto", "PACK", ["a"]]


@pytest.mark.parametrize(("ours", "theirs", "left_out"), PAIRS[1:], ids=_name)
def test_a_value_that_ray_refuses_is_refused(
    ours: type[BaseModel], theirs: type[BaseModel], left_out: set[str]
) -> None:
    needed = {"name": "a", "import_path": "a:b", "gang_size": 1, "actor_class": "a:b"}
    common = {key: value for key, value in needed.items() if key in ours.model_fields}
    for field in ours.model_fields:
        for probe in PROBES:
            given = {**common, field: probe}
            if _refuses(theirs, given):
                # What depends on other fields is a rule of `serve_rules`, tested above.
                ruled = field in ("import_path", "route_prefix", "ssl_certfile", "ssl_keyfile")
                ruled |= field.startswith(
                    ("placement_group_bundle", "policy", "min_rep", "initial_rep")
                )
                assert ruled or _refuses(ours, given), (field, probe)


def _refuses(model: type[BaseModel], given: dict[str, Any]) -> bool:
    try:
        model.model_validate(given)
    except (ValueError, TypeError, AttributeError, NotImplementedError, ImportError):
        return True
    return False


def test_deployments_are_those_of_the_builder(model: Path) -> None:
    app = build(AppArgs(model=str(model), device="cpu", max_model_len=64))
    built = build_app(app, name="a", make_deployment_handle=lambda *_: None)
    assert {one.name for one in built.deployments} == {ENGINE, INGRESS}


def test_several_problems_are_counted(tmp_path: Path, model: Path) -> None:
    path = written(tmp_path, GOOD.replace("port: 8000", "port: abc") + "  port: 1\n", model)
    with pytest.raises(UserError, match=r":2: .*\(and 1 more: paceline explain"):
        read_serve_file(path)


def test_foreign_applications_are_served_unchecked(tmp_path: Path, model: Path) -> None:
    extra = "- {{name: b, route_prefix: /b, import_path: 'json.tool:main', args: {{x: 1}}}}\n"
    file = read_serve_file(written(tmp_path, GOOD + extra, model), overrides={"max_num_seqs": 3})
    assert file.app_names == ["paceline", "b"]
    assert file.config["applications"][0]["args"]["max_num_seqs"] == 3
    assert file.config["applications"][1]["args"] == {"x": 1}


# --- what this machine has ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "needs"),
    [
        ("    num_replicas: 6\n", "4.9 CPU (6 Engine of 0.8, 1 Ingress of 0.1)"),
        ("    num_ingress_replicas: 40\n", "4.8 CPU (1 Engine of 0.8, 40 Ingress of 0.1)"),
        (ENGINE_PART + "num_replicas: 6\n", "4.9 CPU (6 Engine"),
        (ENGINE_PART + "autoscaling_config: {{min_replicas: 6, max_replicas: 9}}\n", "4.9 CPU (6"),
        (INGRESS_PART + "ray_actor_options: {{num_cpus: 4}}\n", "4.8 CPU (1 Engine of 0.8, 1 Ingr"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_numbers(
    tmp_path: Path, model: Path, extra: str, needs: str
) -> None:
    file = read_serve_file(written(tmp_path, GOOD + extra, model))
    with pytest.raises(UserError) as refused:
        before_start.check_fits(file, {"CPU": 4.0})
    assert needs in str(refused.value) and "has 4;" in str(refused.value)
    before_start.check_fits(file, {"CPU": 8.0, "GPU": 0.0})


def test_gpus_are_counted_where_the_layout_asks_for_them(tmp_path: Path, model: Path) -> None:
    text = GOOD.replace("device: cpu", "device: cuda") + "    num_replicas: 2\n"
    file = read_serve_file(written(tmp_path, text, model))
    before_start.check_fits(file, {"CPU": 4.0})
    with pytest.raises(UserError, match=r"needs 2 GPU \(2 Engine of 1\), the private Ray has 1"):
        before_start.check_fits(file, {"CPU": 4.0, "GPU": 1.0})


def test_keys_must_be_there_before_anything_starts(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_KEYS", raising=False)
    text, said = GOOD + "    api_keys_env: MY_KEYS\n", []
    file = read_serve_file(written(tmp_path, text, model))
    with pytest.raises(UserError, match="MY_KEYS"):
        before_start.check_keys(file, None, said.append)
    before_start.check_keys(file, "10.0.0.1:6379", said.append)
    assert "MY_KEYS" in said[0] and "10.0.0.1:6379" in said[0]
    env = "{{runtime_env: {{env_vars: {{MY_KEYS: secret}}}}"
    for extra in ("  runtime_env: {{env_vars: {{MY_KEYS: secret}}}}\n",
                  INGRESS_PART + f"ray_actor_options: {env}, num_cpus: 0.1}}}}\n"):  # fmt: skip
        file = read_serve_file(written(tmp_path, text + extra, model))
        before_start.check_keys(file, None, said.append)
    monkeypatch.setenv("MY_KEYS", " , ")
    with pytest.raises(UserError, match="set or empty"):
        before_start.check_keys(read_serve_file(written(tmp_path, text, model)), None, said.append)
    monkeypatch.setenv("MY_KEYS", "a,b")
    before_start.check_keys(read_serve_file(written(tmp_path, text, model)), None, said.append)
    assert len(said) == 1
