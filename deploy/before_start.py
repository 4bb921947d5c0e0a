"""What a file needs of this machine, checked before Ray starts: port, keys, CPUs and GPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deploy.errors import UserError
from deploy.serve_file import ServeFile
from parallel.placement import INGRESS_CPUS, place_replica
from specconfig.app_args import ENGINE, INGRESS
from specconfig.explaining.explanation import AppExplanation


def check_port(host: str, port: int) -> None:
    """Raise UserError when nobody can listen on `host:port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"port {port} on {host} cannot be used ({error.strerror}); "
                f"choose another with --port, for example --port {port % 65535 + 1}"
            ) from None


def check_keys(file: ServeFile, address: str | None, say: Callable[[str], None]) -> None:
    """The variable of `api_keys_env` must hold a key where the ingress runs.

    Raises:
        UserError: It does not, on the private Ray. Of another cluster's variables nothing is known
            here: that is only said.
    """
    for app, written in _ours(file):
        variable = app.serving["api_keys_env"]
        if variable is None:
            continue
        ingress = _deployment(written, INGRESS).get("ray_actor_options") or {}
        given = {**os.environ, **_variables(written), **_variables(ingress)}
        if any(key.strip() for key in str(given.get(variable, "")).split(",")):
            continue
        reason = f"api_keys_env names {variable}, which is not set or empty"
        if address is None:
            raise UserError(
                f"{reason}; set it here or in the application's runtime_env.env_vars, or remove "
                "api_keys_env"
            )
        say(f"{reason} here; the ingress does not start unless {address} sets it")


def check_fits(file: ServeFile, available: Mapping[str, float]) -> None:
    """Raise UserError when replicas of `file` would wait for ever for what no node has.

    Args:
        available: Amounts by Ray's names of resources; kinds that are not named are not checked.
    """
    parts = [part for app, written in _ours(file) for part in _parts(app, written, available)]
    for kind in available:
        needed = sum(number * each.get(kind, 0.0) for _, number, each in parts)
        if needed <= available[kind] + 1e-6:
            continue
        shares = ", ".join(
            f"{number} {name} of {each[kind]:g}" for name, number, each in parts if each.get(kind)
        )
        raise UserError(
            f"the layout needs {needed:g} {kind} ({shares}), the private Ray has "
            f"{available[kind]:g}; lower num_replicas or tensor_parallel_size, or give a larger "
            "cluster with --address"
        )


def _parts(
    app: AppExplanation, written: Mapping[str, Any], available: Mapping[str, float]
) -> Iterator[tuple[str, int, dict[str, float]]]:
    """(deployment, replicas at start, what each needs)."""
    device = app.config.runtime.device
    use_gpus = device == "cuda" or (device == "auto" and available.get("GPU", 0) > 0)
    engine, ingress = _deployment(written, ENGINE), _deployment(written, INGRESS)
    bundles = engine.get("placement_group_bundles")
    each: dict[str, float] = {}
    for bundle in bundles or place_replica(app.config, use_gpus=use_gpus).bundles:
        for kind, amount in bundle.items():
            each[kind] = round(each.get(kind, 0.0) + amount, 3)
    yield ENGINE, _replicas(engine, app.serving["num_replicas"]), each
    options = ingress.get("ray_actor_options")
    cpus = INGRESS_CPUS if options is None else options.get("num_cpus")
    own = {"CPU": 1.0 if cpus is None else float(cpus)}
    yield INGRESS, _replicas(ingress, app.serving["num_ingress_replicas"]), own


def _replicas(deployment: Mapping[str, Any], built: int) -> int:
    scaling = deployment.get("autoscaling_config")
    if scaling is not None or deployment.get("num_replicas") == "auto":
        least = (scaling or {}).get("min_replicas", 1)
        return int((scaling or {}).get("initial_replicas") or least)
    return int(deployment.get("num_replicas") or built)


def _ours(file: ServeFile) -> list[tuple[AppExplanation, Mapping[str, Any]]]:
    written = {str(app.get("name", "default")): app for app in file.config["applications"]}
    return [(app, written[app.name]) for app in file.apps]


def _deployment(app: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    rows: list[Mapping[str, Any]] = app.get("deployments") or []
    return next((row for row in rows if row.get("name") == name), {})


def _variables(section: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (section.get("runtime_env") or {}).get("env_vars") or {}
    return found
