"""The chart, linted and rendered without a cluster, and what it renders, checked by its readers."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from parallel.placement import place_replica
from specconfig.app_args import AppArgs
from specconfig.explaining.explain import explain_file
from specconfig.runtime_knobs import RuntimeKnobs
from tests.unit.specconfig.catalog import llama

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "paceline"
EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}
FILES = {**EXAMPLES, "everything": Path(__file__).with_name("everything.yaml")}
KUBERNETES = ("1.27", "1.33")
# Custom resources without a schema here: kind, and the group and version that has it.
OTHERS = {
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "ScrapeConfig": "monitoring.coreos.com/v1alpha1",
}
Values = dict[str, Any]
Documents = list[dict[str, Any]]


def values_of(name: str) -> Values:
    if name == "defaults":
        return {}
    loaded: Values = yaml.safe_load(FILES[name].read_text())
    return loaded


def render(values: Values, name: str = "demo", *, is_upgrade: bool = False) -> dict[str, str]:
    with helm_python.Chart.load(str(CHART)) as chart:
        rendered: dict[str, str] = chart.render(
            values, name=name, namespace="ns", is_upgrade=is_upgrade
        )
    return rendered


def documents(values: Values, name: str = "demo") -> Documents:
    return [
        document
        for path, text in render(values, name).items()
        if path.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]


def only(found: Documents, kind: str) -> dict[str, Any]:
    (document,) = [d for d in found if d["kind"] == kind]
    return document


def serve_config(found: Documents) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(only(found, "RayService")["spec"]["serveConfigV2"])
    return config


def refusal(values: Values, name: str = "demo") -> str:
    with pytest.raises(helm_python.HelmError) as caught:
        render(values, name)
    return str(caught.value)


def changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Values:
    """`base` with dotted keys set."""
    values = copy.deepcopy(dict(base))
    for path, value in changes.items():
        *sections, last = path.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return values


@pytest.fixture(scope="module")
def rayservice_schema() -> jsonschema.Draft202012Validator:
    text = gzip.decompress(Path(__file__).with_name("rayservice.schema.json.gz").read_bytes())
    return jsonschema.Draft202012Validator(json.loads(text))


ALL = ["defaults", *FILES]


# --- what is rendered ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_lint_finds_nothing(name: str) -> None:
    found = helm_python.lint(str(CHART), values_of(name), strict=True, kube_version="v1.30.0")
    assert not found["errors"]
    assert [m["error"] for m in found["messages"]] in ([], ["icon is recommended"])


@pytest.mark.parametrize("name", ALL)
def test_every_object_is_valid(
    name: str, rayservice_schema: jsonschema.Draft202012Validator
) -> None:
    for document in documents(values_of(name)):
        if document["kind"] == "RayService":
            errors = [
                f"{'/'.join(map(str, error.absolute_path))}: {error.message}"
                for error in rayservice_schema.iter_errors(document)
            ]
            assert not errors
            check_pods(document)
        elif document["kind"] in OTHERS:
            assert document["apiVersion"] == OTHERS[document["kind"]]
        else:
            for version in KUBERNETES:
                kubernetes_validate.validate(document, version, strict=True)


def check_pods(rayservice: dict[str, Any]) -> None:
    """Pod templates by Kubernetes' own schema, which the CRD has too, but of another version."""
    cluster = rayservice["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        for version in KUBERNETES:
            kubernetes_validate.validate(pod, version, strict=True)


def test_everything_is_switched_on() -> None:
    kinds = sorted(document["kind"] for document in documents(values_of("everything")))
    assert kinds == [
        "ConfigMap", "HTTPRoute", "Ingress", "Job", "NetworkPolicy", "PersistentVolumeClaim",
        "Pod", "PodDisruptionBudget", "PodMonitor", "PrometheusRule", "RayService",
        "ScrapeConfig", "ServiceAccount",
    ]  # fmt: skip


def test_what_costs_is_off_by_default() -> None:
    found = documents({})
    assert sorted(document["kind"] for document in found) == ["Pod", "RayService"]
    assert only(found, "Pod")["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert "nvidia.com/gpu" not in str(found)


# --- the Serve config ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_serve_config_is_ours_and_serves(name: str, tmp_path: Path) -> None:
    values = values_of(name)
    found = documents(values)
    config = serve_config(found)
    ServeDeploySchema.model_validate(config)
    assert config["proxy_location"] == "EveryNode"
    (app,) = config["applications"]
    given = values.get("engine", yaml.safe_load((CHART / "values.yaml").read_text())["engine"])
    assert app["args"] == given
    config_k = AppArgs(**app["args"]).resolve(facts).num_speculative_tokens
    RuntimeKnobs.of(app["deployments"][0]["user_config"], config_k)
    # The check of our own command: keys that Serve ignores, values that the engine refuses.
    file = tmp_path / "serve.yaml"
    file.write_text(only(found, "RayService")["spec"]["serveConfigV2"])
    explanation = explain_file(file, facts)
    assert not explanation.problems
    assert explanation.can_start


def test_grpc_is_served_where_it_is_switched_on() -> None:
    assert "9000" not in str(documents({}))
    found = documents(values_of("everything"))
    functions = ["deploy.grpc.add_to_server"]
    assert serve_config(found)["grpc_options"] == {
        "port": 9000, "grpc_servicer_functions": functions,
    }  # fmt: skip
    cluster = only(found, "RayService")["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container, *_) = group["template"]["spec"]["containers"]
        # The operator puts ports of that name on the Serve service.
        assert {"name": "serve-grpc", "containerPort": 9000} in container["ports"]
    policy = only(found, "NetworkPolicy")
    ports = [rule["ports"][0]["port"] for rule in policy["spec"]["ingress"] if "ports" in rule]
    assert 9000 in ports


def test_args_keep_their_types() -> None:
    # A writer of YAML makes 1e+06 of a million, and a template breaks quotes.
    engine = values_of("everything")["engine"]
    args = serve_config(documents(values_of("everything")))["applications"][0]["args"]
    assert json.dumps(args, sort_keys=True) == json.dumps(engine, sort_keys=True)
    assert AppArgs(**args).kv_cache_memory_bytes == 85899345920


def test_pods_outlive_the_drain_and_so_does_the_old_cluster() -> None:
    found = documents({"drainSeconds": 900, "moveSeconds": 200})
    spec = only(found, "RayService")["spec"]
    pod = spec["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    deployments = serve_config(found)["applications"][0]["deployments"]
    for deployment in deployments:
        assert deployment["graceful_shutdown_timeout_s"] == 900
    (stop,) = re.findall(
        r"--deadline-remaining-seconds (\d+)",
        pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1],
    )
    assert pod["terminationGracePeriodSeconds"] > int(stop) == 200 + 900
    assert spec["rayClusterDeletionDelaySeconds"] > 900


def test_autoscaling_replaces_the_fixed_number() -> None:
    values = values_of("tp4-draft-tp1")
    engine = serve_config(documents(values))["applications"][0]["deployments"][0]
    assert engine["num_replicas"] == "auto"
    assert engine["autoscaling_config"]["max_replicas"] == 4
    cluster = only(documents(values), "RayService")["spec"]["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"] is True
    (group,) = cluster["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 4)


# --- room for the replicas ----------------------------------------------------------------------


def facts(model: str, revision: str | None) -> Mapping[str, Any]:
    """Any model: a plain one, with experts where the name says so."""
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    return llama(**(experts if "A3B" in model else {}))


@pytest.mark.parametrize("per_pod", [0, 1, 2, 8])
@pytest.mark.parametrize("name", ALL)
def test_pods_hold_the_bundles_that_replicas_ask_for(name: str, per_pod: int) -> None:
    values = values_of(name)
    if per_pod:
        sizes = {"worker.ranksPerPod": per_pod, "worker.cpu": 64, "engine.strict_pack": False}
        values = changed({"engine": {"model": "m", "device": "cpu"}, **values}, sizes)
        ranks = ranks_of(values)
        if per_pod % ranks and ranks % per_pod:
            assert "worker.ranksPerPod" in refusal(values)
            return
    found = documents(values)
    app = serve_config(found)["applications"][0]
    args = AppArgs(**app["args"])
    bundles = list(place_replica(args.resolve(facts), use_gpus=args.device == "cuda").bundles)
    (group,) = only(found, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    cpus, gpus = (int(group["rayStartParams"][key]) for key in ("num-cpus", "num-gpus"))
    resources = group["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"]
    assert resources["limits"]["cpu"] == cpus
    assert resources["limits"].get("nvidia.com/gpu", 0) == gpus

    scaling = app["deployments"][0].get("autoscaling_config", {})
    least = scaling.get("min_replicas", args.resolved_num_replicas)
    most = scaling.get("max_replicas", args.resolved_num_replicas)
    # The HTTP front may crowd into any pod.
    room = cpus - 0.1 * args.num_ingress_replicas
    assert fit(bundles * least, group["minReplicas"], room, gpus)
    assert fit(bundles * most, group["maxReplicas"], room, gpus)
    if args.device == "cuda":  # and not one GPU pod too many
        assert not fit(bundles * most, group["maxReplicas"] - 1, room, gpus)
    if args.strict_pack:
        assert fit(bundles, 1, room, gpus)


@pytest.mark.parametrize(("ranks", "fronts"), [(1, 1), (1, 3), (2, 4), (4, 7), (8, 5)])
def test_the_fewest_cores_that_the_chart_takes_are_enough(ranks: int, fronts: int) -> None:
    engine = {"model": "m", "tensor_parallel_size": ranks, "num_ingress_replicas": fronts}
    bundles = place_replica(AppArgs(**engine).resolve(facts), use_gpus=False).bundles
    cores = math.ceil(sum(bundle["CPU"] for bundle in bundles) + 0.1 * fronts - 1e-9)
    values = {"engine": {**engine, "device": "cpu"}, "worker": {"cpu": cores}}
    assert documents(values)
    if cores > 1:
        assert f"set worker.cpu to at least {cores}" in refusal(
            changed(values, {"worker.cpu": cores - 1})
        )


def ranks_of(values: Values) -> int:
    config = AppArgs(**values["engine"]).resolve(facts)
    return len(place_replica(config, use_gpus=False).bundles)


def fit(bundles: list[dict[str, float]], pods: int, cpus: float, gpus: float) -> bool:
    """First fit, as Ray packs."""
    free = [[float(cpus), float(gpus)] for _ in range(pods)]
    for bundle in bundles:
        for room in free:
            if room[0] >= bundle["CPU"] - 1e-6 and room[1] >= bundle.get("GPU", 0.0):
                room[0] -= bundle["CPU"]
                room[1] -= bundle.get("GPU", 0.0)
                break
        else:
            return False
    return True


# --- values that are refused --------------------------------------------------------------------

# (values, where, what the message says)
REFUSED_BY_SCHEMA = [
    ({"engin": {}}, "", "engin"),
    ({"engine.tensor_paralel_size": 2}, "/engine", "tensor_paralel_size"),
    ({"engine.tensor_parallel_size": 0}, "/engine/tensor_parallel_size", "minimum"),
    ({"engine.tensor_parallel_size": "two"}, "/engine/tensor_parallel_size", "want integer"),
    ({"engine.device": "auto"}, "/engine/device", "'cpu', 'cuda'"),
    ({"engine.spec_model": "x"}, "/engine", "spec_model"),
    ({"engine.speculative_config": "ngram"}, "/engine/speculative_config", "want object"),
    ({"engine.speculative_config.num_tokens": 4}, "/engine/speculative_config", "num_tokens"),
    (
        {"engine.speculative_config.num_speculative_tokens": 0},
        "/engine/speculative_config/num_speculative_tokens",
        "exclusiveMinimum",
    ),
    ({"runtime.speculation": True}, "/runtime", "speculation"),
    ({"runtime.max_speculative_tokens": -1}, "/runtime/max_speculative_tokens", "minimum"),
    ({"image.tagg": "v1"}, "/image", "tagg"),
    ({"worker.memory": 8}, "/worker/memory", "want string"),
    ({"worker.memory": "8 GB"}, "/worker/memory", "pattern"),
    ({"worker.cpu": "500m"}, "/worker/cpu", "want integer"),
    ({"drainSeconds": "10m"}, "/drainSeconds", "want integer"),
    ({"auth.mode": "tokn"}, "/auth/mode", "'token', 'disabled'"),
    ({"auth.enableK8sTokenAuth": True}, "/auth", "enableK8sTokenAuth"),
    ({"upgradeStrategy.type": "Rolling"}, "/upgradeStrategy/type", "'NewCluster'"),
    ({"upgradeStrategy.maxSurgePercent": 120}, "/upgradeStrategy/maxSurgePercent", "maximum"),
    ({"upgradeStrategy.intervalSeconds": 0}, "/upgradeStrategy/intervalSeconds", "minimum"),
    ({"initializingTimeout": "soon"}, "/initializingTimeout", "pattern"),
    ({"modelCache.accessMode": "RWX"}, "/modelCache/accessMode", "'ReadWriteMany'"),
    ({"metrics.interval": "fast"}, "/metrics/interval", "pattern"),
    ({"podLabels": {"a": 1}}, "/podLabels/a", "want string"),
]


@pytest.mark.parametrize(("changes", "pointer", "said"), REFUSED_BY_SCHEMA)
def test_a_wrong_value_is_refused_with_a_pointer(changes: Values, pointer: str, said: str) -> None:
    message = refusal(changed({}, changes))
    assert f"at '{pointer}'" in message
    assert said in message


TWO = {"engine.data_parallel_size": 2}
# (values, release name, words of the message)
REFUSED_BY_RULES = [
    ({}, "a" * 40, ["49 characters", "47", "fullnameOverride"]),
    ({"fullnameOverride": "1st"}, "demo", ["1st", "begins with a letter"]),
    ({"fullnameOverride": "a.b"}, "demo", ["a.b", "DNS label"]),
    (
        {"engine.tensor_parallel_size": 4, "worker.ranksPerPod": 3},
        "demo",
        ["worker.ranksPerPod is 3", "4 ranks"],
    ),
    (
        {"engine.tensor_parallel_size": 4, "engine.strict_pack": True, "worker.ranksPerPod": 2},
        "demo",
        ["strict_pack", "worker.ranksPerPod is 2"],
    ),
    (
        {"engine.tensor_parallel_size": 4, "worker.cpu": 3},
        "demo",
        ["worker.cpu is 3", "at least 4"],
    ),
    ({**TWO, "engine.num_replicas": 3}, "demo", ["engine.num_replicas is 3", "whole gangs"]),
    ({"autoscaling.enabled": True, "engine.num_replicas": 2}, "demo", ["remove engine.num_rep"]),
    ({"autoscaling.enabled": True, "autoscaling.minReplicas": 9}, "demo", ["minReplicas is 9"]),
    ({**TWO, "autoscaling.enabled": True}, "demo", ["multiples of engine.data_parallel_size 2"]),
    (
        {
            "engine.speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
            "runtime.max_speculative_tokens": 4,
        },
        "demo",
        ["max_speculative_tokens is 4", "num_speculative_tokens 3"],
    ),
    ({"apiKeys.existingSecret": "s"}, "demo", ["engine.api_keys_env"]),
    ({"engine.api_keys_env": "KEYS"}, "demo", ["KEYS", "apiKeys.existingSecret"]),
    (
        {"upgradeStrategy.type": "NewClusterWithIncrementalUpgrade"},
        "demo",
        ["autoscaling.enabled"],
    ),
    (
        {
            "upgradeStrategy.type": "NewClusterWithIncrementalUpgrade",
            "autoscaling.enabled": True,
        },
        "demo",
        ["upgradeStrategy.gatewayClassName"],
    ),
    (
        {
            "upgradeStrategy": {
                "type": "NewClusterWithIncrementalUpgrade",
                "gatewayClassName": "g",
                "stepSizePercent": 50,
                "maxSurgePercent": 40,
            },
            "autoscaling.enabled": True,
        },
        "demo",
        ["stepSizePercent is 50", "maxSurgePercent 40"],
    ),
    ({"gcsFaultTolerance.enabled": True}, "demo", ["gcsFaultTolerance.redisAddress"]),
    ({"auth": {"mode": "disabled", "existingSecret": "s"}}, "demo", ["auth.mode is disabled"]),
    ({"httpRoute.enabled": True}, "demo", ["httpRoute.parentRefs"]),
    ({"metrics.rules": True}, "demo", ["metrics.enabled: true"]),
]


@pytest.mark.parametrize(("changes", "name", "words"), REFUSED_BY_RULES)
def test_values_that_do_not_fit_are_refused_with_the_fix(
    changes: Values, name: str, words: list[str]
) -> None:
    message = refusal(changed({}, changes), name)
    assert all(word in message for word in words), message


def test_keys_may_come_from_extra_env() -> None:
    env = [{"name": "KEYS", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
    documents(changed({}, {"engine.api_keys_env": "KEYS", "extraEnv": env}))


# --- the parts ----------------------------------------------------------------------------------


def test_pods_are_locked_down() -> None:
    for document in documents(values_of("everything")):
        for spec in pod_specs(document):
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for container in spec["containers"]:
                context = container["securityContext"]
                assert context["capabilities"] == {"drop": ["ALL"]}
                assert context["readOnlyRootFilesystem"] is True
                assert context["allowPrivilegeEscalation"] is False


def pod_specs(document: dict[str, Any]) -> list[dict[str, Any]]:
    if document["kind"] == "Pod":
        return [document["spec"]]
    if document["kind"] == "Job":
        return [document["spec"]["template"]["spec"]]
    if document["kind"] == "RayService":
        cluster = document["spec"]["rayClusterConfig"]
        groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
        return [group["template"]["spec"] for group in groups]
    return []


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("one-gpu", ["hf download Qwen/Qwen3-8B", "hf download Qwen/Qwen3-0.6B"]),
        ("moe-ep-dp", ["hf download Qwen/Qwen3-30B-A3B"]),
        (
            "everything",
            ["hf download org/target --revision 0123abc", "hf download org/draft --revision main"],
        ),
    ],
)
def test_target_and_draft_are_fetched(name: str, commands: list[str]) -> None:
    container = only(documents(values_of(name)), "Job")["spec"]["template"]["spec"]["containers"][0]
    lines = container["command"][-1].splitlines()
    assert [re.sub(r" --exclude '[^']*'|'", "", line) for line in lines] == commands
    # The program takes the line: what stops it is the missing network, not the usage.
    done = subprocess.run(
        [sys.executable, "-m", "huggingface_hub.cli.hf", *shlex.split(lines[0])[1:]],
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "offline mode" in done.stdout + done.stderr


def test_paths_are_not_fetched_and_a_given_claim_is_filled_first() -> None:
    cache = {"enabled": True, "existingClaim": "models"}
    found = documents({"engine": {"model": "/models/m", "device": "cpu"}, "modelCache": cache})
    assert [d["kind"] for d in found if d["kind"] in ("Job", "PersistentVolumeClaim")] == []
    job = only(documents({"modelCache": cache}), "Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"


def test_paceline_is_scraped_once_and_ray_on_every_pod() -> None:
    found = documents(values_of("everything"))
    (targets,) = only(found, "ScrapeConfig")["spec"]["staticConfigs"]
    assert targets["targets"] == ["everything-serve-svc.ns.svc:8000"]
    assert targets["labels"] == {"namespace": "ns", "app": "everything"}
    monitor = only(found, "PodMonitor")["spec"]
    cluster = only(found, "RayService")["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        labels = group["template"]["metadata"]["labels"]
        assert labels.items() >= monitor["selector"]["matchLabels"].items()
        ports = {p["name"] for p in group["template"]["spec"]["containers"][0]["ports"]}
        assert monitor["podMetricsEndpoints"][0]["port"] in ports


def test_alerts_name_the_release_and_keep_their_placeholders() -> None:
    (group,) = only(documents(values_of("everything")), "PrometheusRule")["spec"]["groups"]
    source = yaml.safe_load((CHART / "alerts.yaml").read_text())
    assert [rule["alert"] for rule in group["rules"]] == [rule["alert"] for rule in source]
    assert all('app="everything"' in rule["expr"] for rule in group["rules"])
    assert "$app" not in str(group) and "$namespace" not in str(group)
    assert "{{ $labels.replica }}" in str(group)


def test_the_dashboard_arrives_as_it_is() -> None:
    data = only(documents(values_of("everything")), "ConfigMap")["data"]
    assert data == {"paceline.json": (CHART / "dashboards" / "paceline.json").read_text()}


def test_the_notes_say_what_upgrades_cost() -> None:
    notes = {
        kind: render(changed({}, {"upgradeStrategy.type": kind}))["paceline/templates/NOTES.txt"]
        for kind in ("None", "NewCluster")
    }
    assert "downtime" in notes["None"]
    assert "second cluster" in notes["NewCluster"]
    open_door = render({"ingress": {"enabled": True}})["paceline/templates/NOTES.txt"]
    assert "asks for no key" in open_door


# --- the guide ----------------------------------------------------------------------------------

GUIDE = ROOT / "docs" / "guides" / "kubernetes.md"
BLOCKS = re.findall(r"```(bash|yaml)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
NOTES = "\n".join(
    line for line in render({})["paceline/templates/NOTES.txt"].splitlines() if line[:2] == "  "
)


@pytest.mark.parametrize("script", [text for kind, text in BLOCKS if kind == "bash"] + [NOTES])
def test_shell_commands_are_valid_bash(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_helm_commands_of_the_guide_render() -> None:
    commands = [
        shlex.split(line.replace("\\\n", " "), comments=True)
        for kind, text in BLOCKS if kind == "bash"
        for line in re.findall(r"^helm (?:install|upgrade)(?:[^\\\n]|\\\n)*", text, re.MULTILINE)
    ]  # fmt: skip
    ours = [words for words in commands if "helm/paceline" in words]
    assert len(ours) >= 3
    for words in ours:
        values: Values = {}
        for option, value in itertools.pairwise(words):
            if option == "-f":
                values |= yaml.safe_load(read_file(value))
            elif option == "--set":
                key, _, text = value.partition("=")
                values = changed(values, {key: yaml.safe_load(text)})
        assert documents(values, words[2])


def read_file(name: str) -> str:
    """A file of the repository, or one that the guide shows under its name."""
    if (ROOT / name).exists():
        return (ROOT / name).read_text()
    return next(text for kind, text in BLOCKS if kind == "yaml" and f"# {name}\n" in text)
