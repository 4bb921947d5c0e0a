"""What of `deployments:` does not fit the plan of our application."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specconfig.app_args import ENGINE, INGRESS
from specconfig.engine import EngineConfig
from specconfig.errors import ConfigError, nearest
from specconfig.explaining.serve_rules import Finding, finding, items
from specconfig.explaining.yaml_lines import Path
from specconfig.runtime_knobs import RuntimeKnobs

Bundles = Callable[[EngineConfig], Sequence[Mapping[str, float]]]
"""Resources of each placement group bundle of one replica."""


def check_deployments(
    base: Path, app: Mapping[str, Any], config: EngineConfig, bundles: Bundles
) -> list[Finding]:
    """What does not fit the plan in `deployments:` of our application at `base`."""
    found: list[Finding] = []
    for index, one in items(app, "deployments"):
        where: Path = (*base, "deployments", index)
        name = one.get("name")
        if name == ENGINE:
            found += _engine(where, one, config, bundles(config))
        elif name == INGRESS:
            if one.get("user_config") is not None:
                path = (*where, "user_config")
                fix = f"write it under name: {ENGINE}"
                found.append(finding(path, one["user_config"], f"none for {INGRESS}", fix))
        elif isinstance(name, str):
            close = nearest(name, [ENGINE, INGRESS]) or ENGINE
            rule = f"{ENGINE!r} or {INGRESS!r}, which the application has"
            found.append(finding((*where, "name"), name, rule, f"did you mean {close!r}?"))
    return found


def _engine(
    where: Path,
    one: Mapping[str, Any],
    config: EngineConfig,
    needed: Sequence[Mapping[str, float]],
) -> Iterator[Finding]:
    try:
        RuntimeKnobs.of(one.get("user_config"), config.num_speculative_tokens)
    except ConfigError as error:
        yield Finding((*where, *error.field.split(".")), error)
    if "max_replicas_per_node" in one:
        path = (*where, "max_replicas_per_node")
        rule = f"none: each {ENGINE} replica has a placement group"
        yield finding(path, one["max_replicas_per_node"], rule, "remove it")
    yield from _bundles(where, one.get("placement_group_bundles"), needed)
    yield from _actor_options(where, one.get("ray_actor_options"), needed[0])
    yield from _gang(where, one, config.parallel.data_parallel_size)


def _bundles(where: Path, given: Any, needed: Sequence[Mapping[str, float]]) -> Iterator[Finding]:
    if not isinstance(given, list):
        return
    fits = len(given) >= len(needed) and all(
        isinstance(bundle, Mapping) and bundle.get(kind, 0) >= amount
        for bundle, least in zip(given, needed, strict=False)
        for kind, amount in least.items()
    )
    if not fits:
        path = (*where, "placement_group_bundles")
        rule = f"at least the bundles of this layout, {[dict(bundle) for bundle in needed]}"
        yield finding(path, given, rule, "remove it: the layout knows its bundles")


def _actor_options(where: Path, given: Any, first: Mapping[str, float]) -> Iterator[Finding]:
    """The replica sits in the first bundle, and Ray gives one CPU to who names none."""
    if not isinstance(given, Mapping):
        return
    wanted = {"CPU": given.get("num_cpus"), "GPU": given.get("num_gpus")}
    wanted["CPU"] = 1 if wanted["CPU"] is None else wanted["CPU"]
    resources = given.get("resources")
    wanted |= dict(resources) if isinstance(resources, Mapping) else {}
    for kind, amount in wanted.items():
        if isinstance(amount, int | float) and amount > first.get(kind, 0):
            key = {"CPU": "num_cpus", "GPU": "num_gpus"}.get(kind, "resources")
            rule = f"at most {first.get(kind, 0)} {kind}, what the first bundle has"
            rule += "; without num_cpus Ray takes 1" if key not in given else ""
            path = (*where, "ray_actor_options", key)
            yield finding(path, given.get(key), rule, f"set {key} to 0.1, as the builder does"
                           if kind == "CPU" else f"remove {key}")  # fmt: skip


def _gang(where: Path, one: Mapping[str, Any], size: int) -> Iterator[Finding]:
    gang = one.get("gang_scheduling_config")
    if isinstance(gang, Mapping) and gang.get("gang_size") != size:
        path = (*where, "gang_scheduling_config", "gang_size")
        rule = f"data_parallel_size={size}"
        yield finding(path, gang.get("gang_size"), rule, "remove gang_scheduling_config")
    if size == 1:
        return
    number = one.get("num_replicas")
    if isinstance(number, int) and number % size:
        path = (*where, "num_replicas")
        yield finding(path, number, f"a multiple of data_parallel_size={size}", f"set it to {size}")
    if "placement_group_strategy" in one:
        path = (*where, "placement_group_strategy")
        rule = f"none with data_parallel_size={size}: Serve places gangs itself"
        yield finding(path, one["placement_group_strategy"], rule, "remove it")
