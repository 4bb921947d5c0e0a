"""Run a Serve config file on a Ray that belongs to this process, or on a given one.

Serve's command line does the same with `serve run`; here progress is shown, the HTTP port can be
changed, mistakes become one line, and at the end everything that was started is gone. The two
calls that Serve keeps private (`serve_start`, `deploy_apps`) are used in this module only.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Thread
from typing import Any, Final

import httpx

from deploy.before_start import check_fits, check_keys, check_port
from deploy.errors import UserError, one_line
from deploy.private_ray import num_cpus, ray_cluster
from deploy.serve_file import ServeFile
from deploy.stops import Stops

_DRAIN_S: Final = 10.0


@contextlib.contextmanager
def serving(
    file: ServeFile,
    address: str | None,
    say: Callable[[str], None],
    stops: Stops | None = None,
    timeout_s: float = 900.0,
) -> Iterator[None]:
    """`file` deployed and healthy inside the block, gone after it.

    Raises:
        UserError: It did not become healthy; the message is the reason Serve or the engine gave.
        KeyboardInterrupt: `stops` had a signal before it was healthy.
    """
    stops = stops or Stops()
    check_port(file.host, file.port)
    check_keys(file, address, say)
    if address is None:
        check_fits(file, {"CPU": num_cpus()})
    with ray_cluster(address, say, stops):
        import ray
        from ray import serve

        if address is None:
            total = ray.cluster_resources()
            check_fits(file, {"CPU": total.get("CPU", 0.0), "GPU": total.get("GPU", 0.0)})

        # Importing it sets the level; what it says at INFO is said here in fewer words.
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        is_ready = False
        try:
            stops.check()
            _deploy(file)
            _wait_healthy(file, say, stops, timeout_s)
            is_ready = True
            yield
        finally:
            with stops.ending():
                say("Shutting down")
                # Deleting takes no new requests and lets running ones end; Serve's shutdown cuts
                # them. A Ray of our own that serves nothing yet is simply ended.
                if is_ready or address is not None:
                    _bounded([partial(serve.delete, name) for name in file.app_names], _DRAIN_S)


def _deploy(file: ServeFile) -> None:
    from ray.serve._private import api as private_api
    from ray.serve.schema import ServeDeploySchema

    try:
        schema = ServeDeploySchema.model_validate(file.config)
    except ValueError as error:
        raise UserError(f"Ray Serve refuses the file: {one_line(error)}") from None
    client = private_api.serve_start(
        http_options=schema.http_options.model_dump(),
        grpc_options=schema.grpc_options.model_dump(),
        global_logging_config=schema.logging_config,
        global_tracing_config=schema.tracing_config,
        controller_options=schema.controller_options,
        proxy_location=schema.proxy_location,
    )
    client.deploy_apps(schema)


def _wait_healthy(
    file: ServeFile, say: Callable[[str], None], stops: Stops, timeout_s: float
) -> None:
    from ray import serve

    start = time.monotonic()
    told = ""
    while True:
        applications = serve.status().applications
        states = []
        for name in file.app_names:
            if name not in applications:
                continue
            app = applications[name]
            if app.status.value in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise UserError(f"the app did not start: {_reason(app)}")
            states += [f"{dep} {d.status.value}" for dep, d in app.deployments.items()]
        elapsed = time.monotonic() - start
        line = ", ".join(states) or "building the app"
        if missing := _missing_resources(file):
            line += f"; {missing}"
        if line != told or int(elapsed) % 10 == 0:
            say(f"  {elapsed:3.0f} s  {line}")
            told = line
        if _is_healthy(file.url):
            return
        if elapsed > timeout_s:
            raise UserError(f"the app was not healthy after {timeout_s:.0f} s: {line}")
        stops.sleep(1)


def _missing_resources(file: ServeFile) -> str:
    """What replicas wait for that the cluster does not have free; empty when nothing."""
    import ray

    prefixes = tuple(f"SERVE_REPLICA::{name}#" for name in file.app_names)
    needed: dict[str, float] = {}
    for group in ray.util.placement_group_table().values():
        if group["state"] == "PENDING" and str(group["name"]).startswith(prefixes):
            for bundle in group["bundles"].values():
                for kind, amount in bundle.items():
                    needed[kind] = needed.get(kind, 0.0) + amount
    free = ray.available_resources() if needed else {}
    return ", ".join(
        f"waiting for {amount:g} {kind}, the cluster has {free.get(kind, 0.0):g} free"
        for kind, amount in sorted(needed.items())
        if amount > free.get(kind, 0.0)
    )


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _reason(app: Any) -> str:
    """The last line of the deepest message: the exception itself, without its traceback."""
    messages: list[str] = [d.message for d in app.deployments.values() if d.message] or [
        app.message
    ]
    text: str = next((str(m) for m in messages if "Error" in m or "rror:" in m), messages[0])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0] or "Dead" in line]
    return (errors or lines or ["no reason was given"])[-1]


def _bounded(actions: Sequence[Callable[[], Any]], seconds: float) -> None:
    """Run `actions` side by side, and wait no longer than `seconds` for all."""

    def quiet(action: Callable[[], Any]) -> None:
        with contextlib.suppress(Exception):
            action()

    threads = [Thread(target=quiet, args=(action,), daemon=True) for action in actions]
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def say_to_stdout(line: str) -> None:
    """Progress line; flushed, because people watch it through pipes."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
