"""`paceline bench`: from options to runs, a table and a JSON document."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.bench.load import Job, Progress, closed_loop, open_loop, poisson_arrivals, within
from deploy.bench.prompts import of_categories, read_prompts
from deploy.bench.server import Server, Workload, connected
from deploy.bench.stream import Received
from deploy.bench.summary import Json, summarise
from deploy.bench.table import load_name, table
from deploy.errors import UserError
from deploy.stops import Stops

_FORMAT: Final = 1
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Load:
    """One run: `num_clients` in a closed loop, or `rate` requests a second if that is given."""

    num_requests: int
    num_warmup: int
    num_clients: int = 1
    rate: float | None = None

    @property
    def facts(self) -> Json:
        """How it stands in the document."""
        return {"clients": self.num_clients} if self.rate is None else {"rate": self.rate}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What ends a request and a run early."""

    request_s: float = 300.0
    run_s: float = 1800.0
    is_stopped: Callable[[], bool] = lambda: False


async def measure(server: Server, workload: Workload, load: Load, bounds: Bounds) -> Json:
    """Figures of one run, after its warm-up; also where it was stopped half-way."""

    async def send(index: int) -> Received:
        return await server.ask(workload, index, bounds.request_s)

    warmup = closed_loop(send, load.num_clients, load.num_warmup, ignored := Progress())
    await within(warmup, ignored, bounds.run_s, bounds.is_stopped)
    before = await server.draft_counters()
    progress = Progress()
    run: Job
    if load.rate is None:
        run = closed_loop(send, load.num_clients, load.num_requests, progress)
    else:
        arrivals = poisson_arrivals(load.rate, load.num_requests, workload.seed)
        run = open_loop(send, arrivals, progress)
    await within(run, progress, bounds.run_s, bounds.is_stopped)
    after = await server.draft_counters() if before is not None else None
    drafts = {k: after[k] - v for k, v in before.items()} if before and after else None
    return {"load": load.facts, **summarise(progress, workload, drafts)}


def bench(options: argparse.Namespace, stops: Stops, say: Say) -> int:
    """Run the command; the exit status: 0, 1 where no request was answered, or the signal's.

    Raises:
        UserError: The server, the model or the prompts are not what the options say.
    """
    if options.json is not None:
        _check_writable(options.json)
    document = asyncio.run(_bench(options, stops, say))
    say(table(document))
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if stops.signum is not None:
        return stops.code
    return 0 if all(run["num_completed"] for run in document["runs"]) else 1


async def _bench(options: argparse.Namespace, stops: Stops, say: Say) -> Json:
    prompts = of_categories(read_prompts(options.prompts), options.categories)
    api_key = options.api_key or os.environ.get("PACELINE_API_KEY")
    bounds = Bounds(options.timeout, options.max_seconds, lambda: stops.signum is not None)
    runs: list[Json] = []
    async with connected(options.url, api_key) as server:
        with stops.open():
            workload = await server.fitted(
                Workload(
                    endpoint=options.endpoint,
                    model=await server.find_model(options.model),
                    prompts=prompts,
                    max_tokens=options.max_tokens,
                    temperature=options.temperature,
                    seed=options.seed,
                    extra_body=options.extra_body,
                )
            )
        for load in _loads(options):
            if stops.signum is not None:
                break
            say(f"{load_name(load.facts)}: {load.num_requests} requests")
            runs.append(await measure(server, workload, load, bounds))
    if not runs:
        stops.check()
    return {
        "paceline_bench": _FORMAT,
        "url": server.url,
        "model": workload.model,
        "endpoint": options.endpoint,
        "prompts": Path(options.prompts).name,
        "categories": options.categories,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        "extra_body": options.extra_body,
        "ignore_eos": workload.ignores_eos,
        "has_usage": workload.has_usage,
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "runs": runs,
    }


def _loads(options: argparse.Namespace) -> list[Load]:
    given, warmup = options.num_requests, options.warmup
    if options.rate:
        return [Load(given or 32, 1 if warmup is None else warmup, 1, r) for r in options.rate]
    return [
        Load(given or max(8, 4 * n), n if warmup is None else warmup, n) for n in options.clients
    ]


def _check_writable(path: Path) -> None:
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"cannot write {path}: give --json a file in a folder that exists")
