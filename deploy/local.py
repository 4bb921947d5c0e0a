"""Run a Serve config file on a Ray that belongs to this process, or on a given one.

Serve's command line does the same with `serve run`; here progress is shown, the HTTP port can be
changed, mistakes become one line, and at the end everything that was started is gone. The two
calls that Serve keeps private (`serve_start`, `deploy_apps`) are used in this module only.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Final, TextIO

import httpx
import psutil

import deploy
from deploy.errors import UserError
from deploy.serve_file import ServeFile, one_line

OBJECT_STORE_BYTES: Final = 160_000_000
_DRAIN_S: Final = 10.0


def check_port(host: str, port: int) -> None:
    """Raise UserError when nobody can listen on `host:port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"port {port} on {host} cannot be used ({error.strerror}); "
                f"choose another with --port, for example --port {port + 1}"
            ) from None


@contextlib.contextmanager
def ray_cluster(address: str | None, say: Callable[[str], None]) -> Iterator[None]:
    """A connection to `address`, or to a new private Ray that ends with this block.

    The private Ray listens on loopback only, wants a token nobody else knows, and keeps its files
    in a folder of its own. A Ray that runs on this machine already is neither used nor touched.
    """
    # Set before Ray is imported: it reads them once.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _make_importable()
    folder: str | None = None
    if address is None:
        os.environ["RAY_AUTH_MODE"] = "token"
        # Ray reads it once per process: a second cluster of one process must keep the first's.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.pop("RAY_ADDRESS", None)
        # Unix sockets below it: their paths must stay under 107 bytes.
        folder = tempfile.mkdtemp(prefix="pl-", dir=_short_temp())
    import ray

    # Ray writes task failures of other processes here, among them its own at shutdown. What
    # matters of them reaches the user through Serve's status.
    with (
        contextlib.redirect_stdout(_WithoutRaylet(sys.stdout)),
        contextlib.redirect_stderr(_WithoutRaylet(sys.stderr)),
    ):
        ours: list[psutil.Process] = []
        try:
            if address is None:
                say("Starting Ray")
                _start_private(folder, ours)
            else:
                say(f"Connecting to Ray at {address}")
                _connect(address)
            yield
        finally:
            started = [p for root in ours for p in (root, *_descendants(root))]
            ray.shutdown()
            _end(started)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)


def _start_private(folder: str | None, ours: list[psutil.Process]) -> None:
    """Start Ray; the processes it begins with go to `ours`, also when it fails half-way."""
    import ray

    before = set(psutil.Process().children())
    try:
        ray.init(
            address="local",
            num_cpus=max(4, os.cpu_count() or 1),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            dashboard_host="127.0.0.1",
            namespace="serve",
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.2",
            _temp_dir=folder,
        )
    finally:
        ours += [child for child in psutil.Process().children() if child not in before]


def _connect(address: str) -> None:
    import ray

    try:
        ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise UserError(f"no Ray at {address}: {one_line(error)}") from None


class _WithoutRaylet(io.TextIOBase):
    """A text stream that drops what Ray reports on behalf of its node process."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        if "(raylet)" not in text:
            self._out.write(text)
        return len(text)

    def flush(self) -> None:
        self._out.flush()

    def isatty(self) -> bool:
        # Asked again at exit, by Ray, when the stream may be closed.
        return not self._out.closed and self._out.isatty()


def _short_temp() -> str:
    default = tempfile.gettempdir()
    return default if len(default) < 30 else "/tmp"


def _make_importable() -> None:
    """Let Ray's processes import this package when it is used from a checkout."""
    root = str(Path(deploy.__file__).parents[1])
    if "site-packages" not in root:
        paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _end(processes: list[psutil.Process]) -> None:
    """End what is left of `processes`: first ask, then kill."""
    _, alive = psutil.wait_procs(processes, timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(alive, timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


@contextlib.contextmanager
def serving(
    file: ServeFile, address: str | None, say: Callable[[str], None], timeout_s: float = 900.0
) -> Iterator[None]:
    """`file` deployed and healthy inside the block, gone after it.

    Raises:
        UserError: It did not become healthy; the message is the reason Serve or the engine gave.
    """
    check_port(file.host, file.port)
    with ray_cluster(address, say):
        from ray import serve

        # Importing it sets the level; what it says at INFO is said here in fewer words.
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            _deploy(file)
            _wait_healthy(file, say, timeout_s)
            yield
        finally:
            say("Shutting down")
            if address is None:
                _bounded(serve.shutdown, _DRAIN_S)
            else:
                # Someone else's cluster: only what we brought goes.
                for name in file.app_names:
                    _bounded(partial(serve.delete, name), _DRAIN_S)


def _deploy(file: ServeFile) -> None:
    from ray.serve._private import api as private_api
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(file.config)
    client = private_api.serve_start(
        http_options=schema.http_options.model_dump(),
        grpc_options=schema.grpc_options.model_dump(),
        proxy_location=schema.proxy_location,
    )
    client.deploy_apps(schema)


def _wait_healthy(file: ServeFile, say: Callable[[str], None], timeout_s: float) -> None:
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
        if line != told or int(elapsed) % 10 == 0:
            say(f"  {elapsed:3.0f} s  {line}")
            told = line
        if _is_healthy(file.url):
            return
        if elapsed > timeout_s:
            raise UserError(f"the app was not healthy after {timeout_s:.0f} s: {line}")
        time.sleep(1)


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


def _bounded(action: Callable[[], Any], seconds: float) -> None:
    """Run `action`, but do not wait longer than `seconds`: what follows ends the processes."""

    def quiet() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = Thread(target=quiet, daemon=True)
    thread.start()
    thread.join(seconds)


def say_to_stdout(line: str) -> None:
    """Progress line; flushed, because people watch it through pipes."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
