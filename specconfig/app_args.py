"""``AppArgs``: the args of one Serve application, engine settings plus what only serving needs."""

from __future__ import annotations

import math
import re
from typing import Final

from pydantic import Field, field_validator, model_validator

from specconfig.engine_args import EngineArgs
from specconfig.errors import ConfigError

# Deployments that the application has.
ENGINE: Final = "Engine"
INGRESS: Final = "Ingress"

# No slash, not even at the end: browsers send none.
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


class AppArgs(EngineArgs):
    """Args of ``import_path: deploy.app:build``. A superset of ``EngineArgs``."""

    num_replicas: int | None = Field(
        default=None,
        ge=1,
        description="Engine replicas behind the router, a multiple of data_parallel_size; "
        "None = data_parallel_size.",
    )
    num_ingress_replicas: int = Field(
        default=1,
        ge=1,
        description="HTTP/gRPC front replicas; while a single one restarts after a crash, for "
        "seconds, nobody answers, /health included.",
    )
    max_ongoing_requests: int | None = Field(
        default=None,
        ge=1,
        description="Requests in one replica, running and queued; None = derived.",
    )
    api_keys_env: str | None = Field(
        default=None, description="Environment variable with comma-separated API keys; None = open."
    )
    allowed_origins: list[str] = Field(
        default_factory=list,
        description="Origins of web pages that may call the server (CORS), such as "
        "https://app.example; '*' = any; empty = none.",
    )
    request_timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds until a request is cancelled; None = never."
    )
    stream_interval_tokens: int = Field(
        default=1, ge=1, description="Least tokens per streamed chunk, except the last."
    )

    stream_keepalive_s: float | None = Field(
        default=10.0,
        gt=0,
        description="Seconds without data after which a stream sends a comment, so that proxies "
        "keep it open; None = never.",
    )

    @field_validator("allowed_origins")
    @classmethod
    def _whole_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "allowed_origins",
                    origin,
                    "an origin as browsers send it: scheme, host and port, without a path",
                    "write it as https://app.example or http://localhost:3000",
                )
        return origins

    @model_validator(mode="after")
    def _whole_gangs(self) -> AppArgs:
        if self.resolved_num_replicas % self.data_parallel_size:
            raise ConfigError(
                "num_replicas",
                self.num_replicas,
                f"a multiple of data_parallel_size={self.data_parallel_size}: replicas start and "
                "restart in whole gangs",
                f"set num_replicas: {self.data_parallel_size} or remove it",
            )
        if self.strict_pack and self.data_parallel_size > 1:
            raise ConfigError(
                "strict_pack",
                True,
                f"false with data_parallel_size={self.data_parallel_size}: Ray Serve places the "
                "bundles of a gang together, if possible on one node",
                "remove strict_pack",
            )
        return self

    @property
    def resolved_num_replicas(self) -> int:
        """Engine replicas; whole gangs of ``data_parallel_size``."""
        return self.data_parallel_size if self.num_replicas is None else self.num_replicas

    @property
    def resolved_max_ongoing_requests(self) -> int:
        """Per-replica concurrency given to Serve: what runs plus what may queue."""
        if self.max_ongoing_requests is not None:
            return self.max_ongoing_requests
        return self.max_num_seqs + self.max_num_queued_requests

    @property
    def ingress_max_ongoing_requests(self) -> int:
        """Per-ingress concurrency that can fill every engine replica."""
        total = self.resolved_max_ongoing_requests * self.resolved_num_replicas
        return math.ceil(total / self.num_ingress_replicas)
