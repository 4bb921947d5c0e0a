"""An engine in this process, for scripts: no Ray, no server, the clients' own methods.

>>> with Engine(model="org/model", speculative_config={"method": "ngram", ...}) as engine:
...     engine.generate("Once upon a time", max_tokens=20).text
...     engine.generate_batch(prompts, max_tokens=20)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from actors.requests import GenerateRequest, RunOutput
from deploy.client.asynchronous import AsyncClient
from deploy.client.blocking import Client
from deploy.client.over_handle import front_over
from deploy.engine_client import ReplicaReport
from deploy.facts import ServedModel
from specconfig.engine_args import EngineArgs

if TYPE_CHECKING:
    from actors.verifier.engine import VerifierEngine
    from specconfig.engine import EngineConfig

_TIMEOUT_S = 60.0


class Engine(Client):
    """A whole engine in this process.

    Args:
        progress: Show a bar while it loads.
        settings: Those of the engine, as in a Serve file's `args` (`model`, `max_model_len`,
            `speculative_config`, ...).

    Raises:
        ConfigError: settings that cannot work.
        LoadError: a model that cannot be served here.
    """

    def __init__(self, *, progress: bool = True, **settings: Any) -> None:
        from actors.startup.in_process import STAGES, build_in_process

        config = EngineArgs(**settings).resolve()
        with tqdm(STAGES, disable=not progress, unit="stage", leave=False) as bar:

            def at_stage(stage: str) -> None:
                bar.set_description(stage)
                bar.update(STAGES.index(stage) - bar.n)

            self._engine = build_in_process(config, at_stage=at_stage)
        engines = InProcessEngines(config, self._engine)
        self._run_over(AsyncClient.over(lambda: front_over(engines, _TIMEOUT_S)))

    def close(self) -> None:
        """End what is in progress, and the engine. Idempotent."""
        super().close()
        self._engine.stop()


class InProcessEngines:
    """The one engine of this process, as surfaces see engines."""

    def __init__(self, config: EngineConfig, engine: VerifierEngine) -> None:
        self._config = config
        self._engine = engine

    def generate(self, request: GenerateRequest) -> AsyncGenerator[RunOutput]:
        return self._engine.generate(request)

    async def reports(self, timeout_s: float) -> Sequence[ReplicaReport]:
        status = self._engine.status()
        return [ReplicaReport("local", status.error or "", dict(status.stats))]

    async def describe(self, timeout_s: float) -> dict[str, Any]:
        return {
            "served": asdict(ServedModel.of(self._config)),
            "lossless": self._config.is_lossless,
            "config_digest": self._config.compute_hash(),
        }

    async def aclose(self) -> None:
        """The engine is its owner's to end."""
