"""Whether an engine replica runs or is coming, as Serve's controller sees it.

A request for which there is no replica waits in Serve's router for as long as it takes: a restart
is a matter of seconds. Where none is coming, because the deployment has failed, it is told so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from actors.errors import EngineError

# A request that has heard nothing for that long asks; the controller is asked no more often.
LOOK_S: Final = 3.0
# Between two starts, or a loss and the start that follows it, there is none for a moment.
_AGAIN_S: Final = 1.0
_FAILED: Final = ("DEPLOY_FAILED", "UNHEALTHY")
_COMING: Final = ("STARTING", "UPDATING", "RECOVERING", "RUNNING", "PENDING_MIGRATION")


class NoReplicaComing(EngineError):
    """No engine replica runs, and Serve is not starting one. The message says why."""


def ask_serve(app_name: str, deployment: str) -> str | None:
    """Why no replica of `deployment` is coming; None when one runs, or may come. Blocks."""
    from ray import serve

    app = serve.status().applications.get(app_name)
    if app is None or deployment not in app.deployments:
        return f"there is no deployment {deployment} in application {app_name}"
    found = app.deployments[deployment]
    if found.status not in _FAILED or any(found.replica_states.get(s) for s in _COMING):
        return None
    lines = found.message.strip().splitlines()
    return f"deployment {deployment} is {found.status.value}: {lines[0] if lines else 'no details'}"


class Outlook:
    """What Serve says, asked for by many requests and looked up now and then.

    Args:
        ask: Why none is coming, or None (`ask_serve`). Called in a thread.
        look_s: Least time between two looks.
        again_s: A reason counts when it is still there after that.
    """

    def __init__(
        self, ask: Callable[[], str | None], look_s: float = LOOK_S, again_s: float = _AGAIN_S
    ) -> None:
        self._ask = ask
        self.look_s = look_s
        self._again_s = again_s
        self._lock = asyncio.Lock()
        self._reason: str | None = None
        self._looked_s: float | None = None

    async def check(self) -> None:
        """Return if a replica runs or may come.

        Raises:
            NoReplicaComing: neither now nor a moment later.
        """
        async with self._lock:
            if self._looked_s is None or time.monotonic() - self._looked_s >= self.look_s:
                self._reason = await asyncio.to_thread(self._ask)
                if self._reason is not None:
                    await asyncio.sleep(self._again_s)
                    self._reason = await asyncio.to_thread(self._ask)
                self._looked_s = time.monotonic()
            if self._reason is not None:
                raise NoReplicaComing(f"no engine replica is coming: {self._reason}")
