"""Writes `helm/paceline/values.schema.json`: `python helm/values_schema.py`.

`engine` and `runtime` are the schemas of our own classes, so Helm refuses what the application
would refuse, before anything is installed. The rest is declared here; what it means is written in
values.yaml. Free are only pieces of Kubernetes' own API, which Kubernetes checks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

sys.path.insert(0, str(Path(__file__).parents[1]))

from specconfig.explaining.schema import app_schema
from specconfig.runtime_knobs import RuntimeKnobs

FILE: Final = Path(__file__).parent / "paceline" / "values.schema.json"
# Short forms for command lines; the chart's templates look at speculative_config only.
_NOT_IN_VALUES: Final = ("spec_method", "spec_model", "spec_tokens")

Free = dict[str, Any]
Texts = dict[str, str]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[int, Field(ge=0)]
Percent = Annotated[int, Field(ge=0, le=100)]
Bytes = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?([KMGTPE]i?)?$")]
Duration = Annotated[str, Field(pattern=r"^([0-9]+(h|m|s))+$")]


def _section(title: str, /, **fields: Any) -> type[BaseModel]:
    """A closed object; every key is optional, because values.yaml has them all."""
    types: dict[str, Any] = {key: (kind, None) for key, kind in fields.items()}
    return create_model(title, __config__=ConfigDict(extra="forbid"), **types)


_PLACE: Final = {
    "cpu": Count, "memory": Bytes, "nodeSelector": Texts, "tolerations": list[Free],
    "affinity": Free, "priorityClassName": str,
}  # fmt: skip
_SECRET: Final = {"existingSecret": str, "key": Annotated[str, Field(min_length=1)]}
_SWITCH: Final = {"enabled": bool}

Values = _section(
    "Values",
    fullnameOverride=str,
    image=_section(
        "Image",
        repository=Annotated[str, Field(min_length=1)],
        tag=str,
        pullPolicy=Literal["Always", "IfNotPresent", "Never"],
    ),
    imagePullSecrets=list[Free],
    rayVersion=Annotated[str, Field(pattern=r"^2\.[0-9]+\.[0-9]+$")],
    engine=Free,
    runtime=Free,
    drainSeconds=Seconds,
    moveSeconds=Seconds,
    logging=_section(
        "Logging",
        encoding=Literal["JSON", "TEXT"],
        level=Literal["DEBUG", "INFO", "WARNING", "ERROR"],
    ),
    autoscaling=_section(
        "Autoscaling",
        **_SWITCH,
        minReplicas=Count,
        maxReplicas=Count,
        targetOngoingRequests=Annotated[float, Field(gt=0)],
        upscaleDelaySeconds=Seconds,
        downscaleDelaySeconds=Seconds,
        podIdleSeconds=Seconds,
    ),
    head=_section("Head", **_PLACE),
    worker=_section(
        "Worker",
        **_PLACE,
        shmSize=Bytes,
        gpuResource=Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")],
        ranksPerPod=Annotated[int, Field(ge=0)],
        extraResources=dict[str, int | str],
        topologySpreadConstraints=list[Free],
        runtimeClassName=str,
    ),
    podLabels=Texts,
    podAnnotations=Texts,
    extraEnv=list[Free],
    extraVolumes=list[Free],
    extraVolumeMounts=list[Free],
    podSecurityContext=Free,
    securityContext=Free,
    serviceAccount=_section("ServiceAccount", create=bool, name=str, annotations=Texts),
    hfToken=_section("HfToken", **_SECRET),
    apiKeys=_section("ApiKeys", **_SECRET),
    modelCache=_section(
        "ModelCache",
        **_SWITCH,
        existingClaim=str,
        storageClassName=str,
        accessMode=Literal["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"],
        size=Bytes,
        prefetch=bool,
    ),
    auth=_section("Auth", mode=Literal["token", "disabled"], existingSecret=str),
    upgradeStrategy=_section(
        "UpgradeStrategy",
        type=Literal["None", "NewCluster", "NewClusterWithIncrementalUpgrade"],
        maxSurgePercent=Percent,
        stepSizePercent=Percent,
        intervalSeconds=Count,
        gatewayClassName=str,
    ),
    initializingTimeout=Duration,
    gcsFaultTolerance=_section(
        "GcsFaultTolerance",
        **_SWITCH,
        redisAddress=str,
        redisPassword=_section("RedisPassword", **_SECRET),
    ),
    pdb=_section(
        "Pdb",
        **_SWITCH,
        maxUnavailable=Count | Annotated[str, Field(pattern=r"^[0-9]+%$")],
    ),
    grpc=_section("Grpc", **_SWITCH),
    networkPolicy=_section(
        "NetworkPolicy",
        **_SWITCH,
        operatorNamespace=str,
        clients=list[Free],
        monitoring=list[Free],
    ),
    ingress=_section(
        "Ingress", **_SWITCH, className=str, host=str, annotations=Texts, tls=list[Free]
    ),
    httpRoute=_section("HttpRoute", **_SWITCH, parentRefs=list[Free], hostnames=list[str]),
    metrics=_section(
        "Metrics",
        **_SWITCH,
        interval=Duration,
        labels=Texts,
        rules=bool,
        dashboards=bool,
        dashboardLabels=Texts,
    ),
    **{"global": Free},  # Helm's own, when the chart is a part of another
)


def values_schema() -> dict[str, Any]:
    """JSON Schema of the chart's values."""
    schema = Values.model_json_schema()
    engine = app_schema()
    schema["$defs"] |= engine.pop("$defs")
    properties = engine["properties"]
    for name in _NOT_IN_VALUES:
        del properties[name]
    # auto would ask Ray for GPUs when it happens to have some: pods are sized before that.
    properties["device"] = {
        "enum": ["cpu", "cuda"],
        "description": "cuda: each rank asks for one GPU.",
    }
    engine["required"] = ["model", "device"]
    schema["properties"] |= {"engine": engine, "runtime": RuntimeKnobs.model_json_schema()}
    del engine["$schema"]
    plain: dict[str, Any] = _plain(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **plain}


def _plain(node: Any) -> Any:
    """Without titles, which repeat names, and defaults, which values.yaml and AppArgs have."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if key not in ("title", "default")}
    for key in ("properties", "$defs"):  # here keys are names of ours
        if key in kept:
            kept[key] = {name: _plain(value) for name, value in kept[key].items()}
    return {key: v if key in ("properties", "$defs") else _plain(v) for key, v in kept.items()}


def as_text() -> str:
    """The file's text."""
    return json.dumps(values_schema(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(as_text())
