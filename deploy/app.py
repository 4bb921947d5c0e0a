"""`serve run` entry: `import_path: deploy.app:build`, `args:` as in `AppArgs`."""

# No `from __future__ import annotations` here: Serve reads the type of `build`'s parameter to
# validate `args`, and must find the class, not its name.
from typing import Any, Final

from ray import serve
from ray.serve import Application
from ray.serve.config import GangSchedulingConfig

from actors.startup.nodes import replica_placement
from deploy.api_keys import ApiKeys
from deploy.engine import Engine
from deploy.engine_client import HandleEngineClient
from deploy.facts import ServedModel
from deploy.grpc.rpcs import Rpcs
from parallel.placement import INGRESS_CPUS, VERIFIER_CPUS, pack_strategy
from specconfig.app_args import ENGINE, INGRESS, AppArgs
from specconfig.engine import EngineConfig
from specconfig.readers import check_supported

# Answers run for minutes; a replica that drains must be given that long to finish them.
DRAIN_S: Final = 600.0
# /health, /metrics and /v1/models must get through while every engine slot is taken.
_INGRESS_HEADROOM: Final = 64
_REFUSAL_SLOTS: Final = 16


class Ingress(Rpcs):
    """The front for HTTP and gRPC: no model, no KV. Any number of replicas."""

    def __init__(self, engine: Any, args: AppArgs) -> None:
        # Imported here: the driver and the Serve controller only build the app.
        from deploy.front import Front
        from deploy.grpc.service import GrpcService
        from deploy.openai.service import OpenAIService, ServiceOptions
        from deploy.text import TextProcessor

        served = ServedModel.of(args.resolve())
        front = Front(
            HandleEngineClient(engine),
            TextProcessor.load(served.tokenizer, served.tokenizer_revision),
            served,
            request_timeout_s=args.request_timeout_s,
        )
        options = ServiceOptions(args.stream_interval_tokens, args.stream_keepalive_s)
        self._keys = ApiKeys.from_environment(args.api_keys_env)
        self._service = OpenAIService(front, options)
        self._grpc = GrpcService(front, self._keys)
        self._allowed_origins = args.allowed_origins

    def __serve_build_asgi_app__(self) -> Any:
        from deploy.openai.ingress import create_app

        return create_app(self._service, self._keys, self._allowed_origins)


def build(args: AppArgs) -> Application:
    """The application: ingress replicas in front of engine replicas."""
    config = args.resolve()
    check_supported(config)
    capacity = args.resolved_max_ongoing_requests
    engine = serve.deployment(
        name=ENGINE,
        num_replicas=args.resolved_num_replicas,
        # A few more than the engine takes: it refuses them in milliseconds, exactly at its limit
        # and with an estimate of when to come back. Serve's own limit counts requests that are
        # only on their way, so a burst that fits would be refused; it is the second line.
        max_ongoing_requests=capacity + _REFUSAL_SLOTS,
        max_queued_requests=2 * capacity + _REFUSAL_SLOTS,
        backpressure_config={"status_code": 429, "retry_after_s": 1},
        placement_group_bundles=list(replica_placement(config).bundles),
        **_grouping(config),
        ray_actor_options={"num_cpus": VERIFIER_CPUS},
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        user_config={},
    )(Engine)
    ingress = serve.deployment(
        name=INGRESS,
        num_replicas=args.num_ingress_replicas,
        max_ongoing_requests=2 * args.ingress_max_ongoing_requests + _INGRESS_HEADROOM,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        # A redeploy keeps one until its successor is ready, or nobody would answer /health.
        max_surge_percent=100,
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=0.5,
    )(serve.ingress()(Ingress))
    app: Application = ingress.bind(engine.bind(args), args)
    return app


def _grouping(config: EngineConfig) -> dict[str, Any]:
    """How Serve puts replicas together: data-parallel ranks start and restart as one gang."""
    size = config.parallel.data_parallel_size
    if size == 1:
        return {"placement_group_strategy": pack_strategy(config)}
    return {"gang_scheduling_config": GangSchedulingConfig(gang_size=size)}
