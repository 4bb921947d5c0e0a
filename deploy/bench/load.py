"""Who asks when. Closed loop: N clients, each asks again when it is answered. Open loop: requests
come when they come, whatever the server does, as a Poisson process."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from deploy.bench.stream import Received

_WATCH_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: its number, when it was due (`time.perf_counter`) and what came."""

    index: int
    due_at: float
    ended_at: float
    received: Received


# Sends request `index` and returns when it has ended; failures are in what it returns.
Send = Callable[[int], Coroutine[Any, Any, Received]]
Job = Coroutine[Any, Any, None]


@dataclass(slots=True)
class Progress:
    """A run so far; complete or not, it can be summarised."""

    outcomes: list[Outcome] = field(default_factory=list)
    num_sent: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    cpu_s: float = 0.0
    stopped: str | None = None

    @property
    def num_cut(self) -> int:
        """Requests that had not ended when the run was stopped."""
        return self.num_sent - len(self.outcomes)


def poisson_arrivals(rate: float, num_requests: int, seed: int) -> list[float]:
    """Seconds from a run's start to each request: the first at once, `rate` a second on average."""
    draw = random.Random(seed)
    times, now = [], 0.0
    for _ in range(num_requests):
        times.append(now)
        now += draw.expovariate(rate)
    return times


async def closed_loop(send: Send, num_clients: int, num_requests: int, progress: Progress) -> None:
    """`num_requests` requests by `num_clients` clients that never pause."""
    numbers = iter(range(num_requests))

    async def client() -> None:
        for index in numbers:
            await _one(send, index, time.perf_counter(), progress)

    await _together(client() for _ in range(min(num_clients, num_requests)))


async def open_loop(send: Send, arrivals: Sequence[float], progress: Progress) -> None:
    """A request at each of `arrivals`. What it waits, here too, counts from when it was due."""
    start = time.perf_counter()

    async def arrive(index: int, after_s: float) -> None:
        due = start + after_s
        await asyncio.sleep(due - time.perf_counter())
        await _one(send, index, due, progress)

    await _together(arrive(i, after) for i, after in enumerate(arrivals))


async def within(
    run: Job, progress: Progress, seconds: float, is_stopped: Callable[[], bool]
) -> None:
    """`run` until it ends, `seconds` have passed or `is_stopped`; what is open then is cut."""
    task = asyncio.ensure_future(run)
    cpu = time.process_time()
    progress.started_at = time.perf_counter()
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_WATCH_S)
            if is_stopped():
                progress.stopped = "stopped by a signal"
            elif time.perf_counter() - progress.started_at > seconds:
                progress.stopped = f"stopped after {seconds:g} s (--max-seconds)"
            if progress.stopped is not None:
                break
    finally:
        progress.ended_at = time.perf_counter()
        progress.cpu_s = time.process_time() - cpu
        task.cancel()
        await asyncio.gather(task, return_exceptions=progress.stopped is not None)


async def _one(send: Send, index: int, due_at: float, progress: Progress) -> None:
    progress.num_sent += 1
    received = await send(index)
    progress.outcomes.append(Outcome(index, due_at, time.perf_counter(), received))


async def _together(jobs: Iterable[Job]) -> None:
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(job)
