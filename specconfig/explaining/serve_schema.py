"""What a Ray Serve config file may hold, as data: sections, keys and types.

Serve ignores keys that it does not know, so we must not, and checking a file must not import Ray. A
test compares every section with Ray's own class.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StrictInt,
)

# Ray Serve takes an absent key but no null for most fields; defaults are not validated.
_ABSENT: Any = None


class Section(BaseModel):
    """One mapping of the file."""

    model_config = ConfigDict(extra="forbid")


def _is_level(value: int | str) -> int | str:
    known = logging.getLevelNamesMapping()
    if value not in known and value not in known.values():
        raise ValueError(f"one of {', '.join(known)}")
    return value


def _is_record_field(value: str) -> str:
    if value not in {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}:
        raise ValueError("attributes of Python's logging.LogRecord")
    return value


def _is_queue_limit(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError("-1 (no limit) or a positive number")
    return value


def _is_single_restart(value: str) -> str:
    if value == "RESTART_REPLICA":
        raise ValueError("RESTART_GANG; RESTART_REPLICA is not implemented by Ray Serve")
    return value


def _is_import_path(value: str) -> str:
    if not {".", ":"} & set(value.strip(".:")):
        raise ValueError("'module:name'")
    return value


ImportPath = Annotated[str, AfterValidator(_is_import_path)]


class Logging(Section):
    """`logging_config`."""

    encoding: Literal["TEXT", "JSON"] = _ABSENT
    log_level: Annotated[int | str, AfterValidator(_is_level)] = _ABSENT
    logs_dir: str | None = None
    enable_access_log: bool = _ABSENT
    additional_log_standard_attrs: list[Annotated[str, AfterValidator(_is_record_field)]] = _ABSENT


class Tracing(Section):
    """`tracing_config`."""

    enabled: bool = _ABSENT
    exporter_import_path: str = _ABSENT
    sampling_ratio: Annotated[float, Field(ge=0, le=1)] = _ABSENT


class ControllerEnv(Section):
    """`controller_options.runtime_env`: Serve takes nothing else there."""

    env_vars: dict[str, str] = _ABSENT


class Controller(Section):
    """`controller_options`."""

    runtime_env: ControllerEnv | None = None


class Http(Section):
    """`http_options`."""

    host: str = _ABSENT
    port: Annotated[int, Field(ge=1, le=65535)] = _ABSENT
    root_path: str = _ABSENT
    request_timeout_s: float | None = None
    keep_alive_timeout_s: int = _ABSENT
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None


class Grpc(Section):
    """`grpc_options`."""

    port: Annotated[int, Field(ge=1, le=65535)] = _ABSENT
    grpc_servicer_functions: list[str] = _ABSENT
    request_timeout_s: float | None = None
    enable_reflection: bool = _ABSENT


class ActorOptions(Section):
    """`ray_actor_options`."""

    runtime_env: dict[str, Any] = _ABSENT
    num_cpus: NonNegativeFloat | None = None
    num_gpus: NonNegativeFloat | None = None
    memory: NonNegativeFloat | None = None
    resources: dict[str, Any] = _ABSENT
    accelerator_type: str | None = None
    label_selector: dict[str, str] | None = None
    fallback_strategy: list[dict[str, Any]] | None = None


class Backpressure(Section):
    """`backpressure_config`."""

    status_code: Literal[503, 429] = _ABSENT
    retry_after_s: NonNegativeFloat | None = None


class Policy(Section):
    """`autoscaling_config.policy`."""

    policy_function: ImportPath = _ABSENT
    policy_kwargs: dict[str, Any] = _ABSENT


class Autoscaling(Section):
    """`autoscaling_config`."""

    min_replicas: NonNegativeInt = _ABSENT
    initial_replicas: NonNegativeInt | None = None
    max_replicas: PositiveInt = _ABSENT
    target_ongoing_requests: PositiveFloat | None = None
    metrics_interval_s: PositiveFloat = _ABSENT
    look_back_period_s: PositiveFloat = _ABSENT
    smoothing_factor: PositiveFloat = _ABSENT
    upscale_smoothing_factor: PositiveFloat | None = None
    downscale_smoothing_factor: PositiveFloat | None = None
    upscaling_factor: PositiveFloat | None = None
    downscaling_factor: PositiveFloat | None = None
    downscale_delay_s: NonNegativeFloat = _ABSENT
    downscale_to_zero_delay_s: NonNegativeFloat | None = None
    upscale_delay_s: NonNegativeFloat = _ABSENT
    aggregation_function: Annotated[
        Literal["mean", "max", "min"], BeforeValidator(lambda value: str(value).lower())
    ] = _ABSENT
    policy: Policy = _ABSENT


class Router(Section):
    """`request_router_config`."""

    request_router_class: ImportPath = _ABSENT
    request_router_kwargs: dict[str, Any] = _ABSENT
    request_routing_stats_period_s: PositiveFloat = _ABSENT
    request_routing_stats_timeout_s: PositiveFloat = _ABSENT
    initial_backoff_s: PositiveFloat = _ABSENT
    backoff_multiplier: PositiveFloat = _ABSENT
    max_backoff_s: PositiveFloat = _ABSENT


class Gang(Section):
    """`gang_scheduling_config`."""

    gang_size: PositiveInt
    gang_placement_strategy: Literal["PACK", "SPREAD"] = _ABSENT
    runtime_failure_policy: Annotated[
        Literal["RESTART_GANG", "RESTART_REPLICA"], AfterValidator(_is_single_restart)
    ] = _ABSENT


class DeploymentActor(Section):
    """An item of `deployment_actors`."""

    name: str
    actor_class: ImportPath
    init_args: list[Any] = _ABSENT
    init_kwargs: dict[str, Any] = _ABSENT
    actor_options: dict[str, Any] = _ABSENT


class Deployment(Section):
    """An item of `deployments`."""

    name: str
    num_replicas: Annotated[StrictInt, Field(gt=0)] | Literal["auto"] | None = None
    max_ongoing_requests: PositiveInt = _ABSENT
    max_queued_requests: Annotated[StrictInt, AfterValidator(_is_queue_limit)] = _ABSENT
    backpressure_config: Backpressure = _ABSENT
    user_config: dict[Any, Any] | None = None
    autoscaling_config: Autoscaling | None = None
    graceful_shutdown_wait_loop_s: NonNegativeFloat = _ABSENT
    graceful_shutdown_timeout_s: NonNegativeFloat = _ABSENT
    health_check_period_s: PositiveFloat = _ABSENT
    health_check_timeout_s: PositiveFloat = _ABSENT
    ray_actor_options: ActorOptions = _ABSENT
    placement_group_bundles: list[dict[str, float]] = _ABSENT
    placement_group_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = _ABSENT
    placement_group_bundle_label_selector: list[dict[str, str]] = _ABSENT
    max_replicas_per_node: Annotated[int, Field(ge=1, le=100)] = _ABSENT
    logging_config: Logging = _ABSENT
    request_router_config: Router = _ABSENT
    gang_scheduling_config: Gang | None = None
    deployment_actors: list[DeploymentActor] | None = None
    rolling_update_percentage: Annotated[float, Field(gt=0, le=1)] = _ABSENT
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] = _ABSENT


class Application(Section):
    """An item of `applications`."""

    name: Annotated[str, Field(min_length=1)] = _ABSENT
    route_prefix: str | None = None
    import_path: str
    runtime_env: dict[str, Any] = _ABSENT
    deployments: list[Deployment] = _ABSENT
    autoscaling_policy: dict[str, Any] | None = None
    args: dict[Any, Any] = _ABSENT
    logging_config: Logging | None = None
    external_scaler_enabled: bool = _ABSENT


class File(Section):
    """A whole file."""

    proxy_location: Literal["Disabled", "HeadOnly", "EveryNode"] = _ABSENT
    http_options: Http = _ABSENT
    grpc_options: Grpc = _ABSENT
    controller_options: Controller | None = None
    logging_config: Logging | None = None
    tracing_config: Tracing | None = None
    applications: Annotated[list[Application], Field(min_length=1)]
    target_capacity: Annotated[float, Field(ge=0, le=100)] | None = None
