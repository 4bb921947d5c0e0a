"""Keys of a Ray Serve config file, as data: Serve ignores unknown ones, so we must not.

Kept here because checking a file must not import Ray; a test compares the sets with Ray's own
schema classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specconfig.errors import ConfigError, unknown_key
from specconfig.explaining.yaml_lines import Path

TOP = frozenset({
    "proxy_location", "http_options", "grpc_options", "controller_options", "logging_config",
    "tracing_config", "applications", "target_capacity",
})  # fmt: skip
APPLICATION = frozenset({
    "name", "route_prefix", "import_path", "runtime_env", "host", "port", "deployments",
    "autoscaling_policy", "args", "logging_config", "external_scaler_enabled",
})  # fmt: skip
DEPLOYMENT = frozenset({
    "name", "num_replicas", "max_ongoing_requests", "max_queued_requests", "backpressure_config",
    "user_config", "autoscaling_config", "graceful_shutdown_wait_loop_s",
    "graceful_shutdown_timeout_s", "health_check_period_s", "health_check_timeout_s",
    "ray_actor_options", "placement_group_bundles", "placement_group_strategy",
    "placement_group_bundle_label_selector", "max_replicas_per_node", "logging_config",
    "request_router_config", "gang_scheduling_config", "deployment_actors",
    "rolling_update_percentage", "max_surge_percent",
})  # fmt: skip
HTTP_OPTIONS = frozenset({
    "host", "port", "root_path", "request_timeout_s", "keep_alive_timeout_s", "ssl_keyfile",
    "ssl_certfile", "ssl_keyfile_password", "ssl_ca_certs",
})  # fmt: skip
GRPC_OPTIONS = frozenset({
    "port", "grpc_servicer_functions", "request_timeout_s", "enable_reflection",
})  # fmt: skip
LOGGING = frozenset({
    "encoding", "log_level", "logs_dir", "enable_access_log", "additional_log_standard_attrs",
})  # fmt: skip
ACTOR_OPTIONS = frozenset({
    "runtime_env", "num_cpus", "num_gpus", "memory", "resources", "accelerator_type",
    "label_selector", "fallback_strategy",
})  # fmt: skip

BUILDER = "deploy.app:build"
"""import_path whose args we understand."""


@dataclass(frozen=True)
class Finding:
    """One problem and where it is."""

    path: Path
    error: ConfigError


def _check(found: list[Finding], path: Path, section: Any, valid: frozenset[str]) -> None:
    if section is None:
        return
    name = ".".join(str(part) for part in path)
    if not isinstance(section, Mapping):
        error = ConfigError(name or "file", section, "a mapping", "write key: value lines")
        found.append(Finding(path, error))
        return
    for key in section:
        if key not in valid:
            error = unknown_key(name, str(key), valid, section[key])
            found.append(Finding((*path, str(key)), error))


def _rows(found: list[Finding], path: Path, rows: Any) -> list[tuple[Path, Any]]:
    if rows is None:
        return []
    if not isinstance(rows, list):
        name = ".".join(str(part) for part in path)
        found.append(Finding(path, ConfigError(name, rows, "a list", "start items with '- '")))
        return []
    return [((*path, index), row) for index, row in enumerate(rows)]


def _subsections(
    found: list[Finding], path: Path, section: Any, names: Mapping[str, frozenset[str]]
) -> None:
    if isinstance(section, Mapping):
        for name, valid in names.items():
            _check(found, (*path, name), section.get(name), valid)


def check_serve_keys(data: Mapping[str, Any]) -> list[Finding]:
    """Every key that Serve would silently ignore, at any level."""
    found: list[Finding] = []
    _check(found, (), data, TOP)
    _subsections(found, (), data, {
        "http_options": HTTP_OPTIONS, "grpc_options": GRPC_OPTIONS, "logging_config": LOGGING,
    })  # fmt: skip
    for path, app in _rows(found, ("applications",), data.get("applications")):
        _check(found, path, app, APPLICATION)
        _subsections(found, path, app, {"logging_config": LOGGING})
        if not isinstance(app, Mapping):
            continue
        for inner, deployment in _rows(found, (*path, "deployments"), app.get("deployments")):
            _check(found, inner, deployment, DEPLOYMENT)
            _subsections(found, inner, deployment, {
                "ray_actor_options": ACTOR_OPTIONS, "logging_config": LOGGING,
            })  # fmt: skip
    return found
