"""The front of every surface: from what a caller asks to runs of tokens, whoever carries them.

HTTP, gRPC and the Python clients differ in names and forms only. What they share is here: the
prompt becomes token ids, values are checked against the server's limits, a seed is drawn, and the
answer outlives the loss of an engine.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from actors.checks import Names, shown
from actors.requests import GenerateRequest, RunOutput
from deploy.engine_client import EngineClient, ReplicaReport
from deploy.facts import ServedModel
from deploy.failures import ModelNotFound
from deploy.recovery import RecoveryPolicy, generate_with_recovery
from deploy.requests import Seeds, complete_request
from deploy.text import Prompt, TextProcessor

T = TypeVar("T")
_REPORT_TIMEOUT_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Health:
    """Whether at least one engine can answer, and what the others say."""

    num_replicas: int
    num_healthy: int
    reason: str

    @property
    def is_healthy(self) -> bool:
        return self.num_healthy > 0


class Front:
    """One process's way to the engines of one served model.

    Args:
        client: The engines.
        text: Of the served model.
        served: Its limits.
        recovery: Bounds of recovery; None: the defaults.
        request_timeout_s: Of a whole request; None: no bound.
    """

    def __init__(
        self,
        client: EngineClient,
        text: TextProcessor,
        served: ServedModel,
        recovery: RecoveryPolicy | None = None,
        request_timeout_s: float | None = None,
    ) -> None:
        self.text = text
        self.served = served
        self._client = client
        self._recovery = recovery
        self._request_timeout_s = request_timeout_s
        self._seeds = Seeds(served.seed)
        # Tokenising a long prompt takes tens of milliseconds: never on the event loop, where it
        # would hold up every stream.
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenise")

    def new_request_id(self, prefix: str) -> str:
        """An id for the engine. Not the caller's: it may repeat its own on a retry while the
        first try runs."""
        return f"{prefix}-{uuid.uuid4().hex}"

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound unless `name` is what is served here; None asks for nothing."""
        if name is not None and name != self.served.name:
            raise ModelNotFound(
                f"the model {shown(name)} does not exist here; this server serves "
                f"{self.served.name!r}",
                param="model",
                code="model_not_found",
            )

    async def start(
        self,
        request: GenerateRequest,
        prompt: Prompt | Callable[[], Prompt],
        names: Names | None = None,
    ) -> AsyncGenerator[RunOutput]:
        """Runs of `request`, which is complete but for its prompt and perhaps a seed. The first
        only says that an engine took it.

        `prompt` may be a function, where making it takes a while. `names`: the surface's names of
        the engine's fields, where they differ.

        Raises:
            RequestError: a value is outside what this server allows. Engines' refusals come with
                the first run.
        """

        def complete() -> GenerateRequest:
            given = prompt() if callable(prompt) else prompt
            return complete_request(request, given, self.text, self.served, self._seeds, names)

        completed = await self.off_loop(complete)
        return generate_with_recovery(
            self._client,
            completed,
            self.text.detokenizer_of,
            self._recovery,
            self._request_timeout_s,
        )

    async def reports(self) -> Sequence[ReplicaReport]:
        """Every engine replica's report."""
        return await self._client.reports(_REPORT_TIMEOUT_S)

    async def health(self) -> Health:
        """Of all replicas together."""
        reports = await self.reports()
        reasons = [report.reason for report in reports if report.reason]
        healthy = len(reports) - len(reasons)
        reason = "; ".join(reasons) if reasons or healthy else "no engine replica is running"
        return Health(len(reports), healthy, reason)

    async def describe(self) -> dict[str, Any]:
        """The resolved facts of one engine."""
        return await self._client.describe(_REPORT_TIMEOUT_S)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """`work` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def aclose(self) -> None:
        """End the threads and the connections to engines. Idempotent."""
        self._pool.shutdown(wait=False)
        await self._client.aclose()
