"""The Ray of one command: a private one that ends with it, or a connection to a given one.

The private Ray listens on loopback only, wants a token nobody else knows, and keeps its files in
a folder of its own. A Ray that runs on this machine already is neither used nor touched.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TextIO

import psutil

import deploy
from deploy.errors import UserError, one_line
from deploy.serve_options import set_options, unset_options
from deploy.stops import Stops
from parallel.owned_dir import OwnedDir, remove_ownerless
from parallel.transport.socket import SocketDir

OBJECT_STORE_BYTES: Final = 160_000_000
_PREFIX: Final = "pl-"
_END_S: Final = 5.0


def num_cpus() -> int:
    """CPUs that the private Ray counts: shares of them are bookkeeping, small machines have 4."""
    return max(4, os.cpu_count() or 1)


@contextlib.contextmanager
def ray_cluster(address: str | None, say: Callable[[str], None], stops: Stops) -> Iterator[None]:
    """A connection to `address`, or to a new private Ray that is gone after this block."""
    # Set before Ray is imported: it reads them once.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _make_importable()
    private: PrivateRay | None = None
    # Ray writes task failures of other processes here, among them its own at shutdown. What
    # matters of them reaches the user through Serve's status.
    with (
        contextlib.redirect_stdout(_WithoutRaylet(sys.stdout)),
        contextlib.redirect_stderr(_WithoutRaylet(sys.stderr)),
    ):
        try:
            if address is None:
                private = PrivateRay()
                stops.end_at_once = private.kill
                private.start(say, stops)
            else:
                _connect(address, say, stops)
            yield
        finally:
            with stops.ending():
                if private is not None:
                    private.end()
                else:
                    _disconnect()


class PrivateRay:
    """A Ray on loopback that belongs to this process."""

    def __init__(self) -> None:
        os.environ["RAY_AUTH_MODE"] = "token"
        # Ray reads it once per process: a second cluster of one process must keep the first's.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.pop("RAY_ADDRESS", None)
        parent = _short_temp()
        remove_ownerless(_PREFIX, parent)
        # Unix sockets below it: their paths must stay under 107 bytes.
        self._folder = OwnedDir(_PREFIX, parent)
        set_options(self._folder.path)

    def start(self, say: Callable[[str], None], stops: Stops) -> None:
        """Start it, a second time where the first fails: a busy machine may be too slow once.

        Raises:
            UserError: It did not start.
            KeyboardInterrupt: A signal came.
        """
        say("Starting Ray")
        for is_last in (False, True):
            try:
                self._init(stops)
                stops.check()
                return
            except Exception as error:
                stops.check()
                reason = one_line(error)
                if is_last:
                    raise UserError(
                        f"Ray did not start: {reason}; free CPU time or memory on this machine, "
                        "or give a running cluster with --address"
                    ) from None
                say(f"Ray did not start ({reason}); trying once more")
                self._end_processes()

    def _init(self, stops: Stops) -> None:
        import ray

        with _our_signals(stops):
            ray.init(
                address="local",
                num_cpus=num_cpus(),
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                dashboard_host="127.0.0.1",
                namespace="serve",
                log_to_driver=False,
                logging_level="ERROR",
                _node_ip_address="127.0.0.2",
                _temp_dir=str(self._folder.path),
            )

    def processes(self) -> list[psutil.Process]:
        """Everything that runs for it: children that name its folder, and what they started."""
        found: list[psutil.Process] = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if any(str(self._folder.path) in word for word in child.cmdline()):
                    found += [child, *child.children(recursive=True)]
        return found

    def end(self) -> None:
        """End its processes and remove its folder, and what killed replicas left behind."""
        self._end_processes()
        self._remove()

    def _end_processes(self) -> None:
        started = self.processes()
        _disconnect()
        _end(started)

    def kill(self) -> None:
        """The same without waiting for anybody."""
        started = self.processes()
        for process in started:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(started, timeout=2)
        self._remove()

    def _remove(self) -> None:
        self._folder.close()
        SocketDir.remove_ownerless()
        unset_options()


@contextlib.contextmanager
def _our_signals(stops: Stops) -> Iterator[None]:
    """Around `ray.init`, which takes SIGTERM over and would end this process without a clean-up.

    Its Python code does so before there is anything to lose. Its native code does so near the end:
    a SIGTERM at that moment reaches `stops` too, but comes with a stack trace on descriptor 2.
    """
    from ray._private import utils

    theirs = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    sys.stderr.flush()
    stderr = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)
        utils.set_sigterm_handler = theirs
        stops.install()


def _connect(address: str, say: Callable[[str], None], stops: Stops) -> None:
    import ray

    say(f"Connecting to Ray at {address}")
    try:
        with _our_signals(stops):
            ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="ERROR")
        stops.check()
    except (ConnectionError, ValueError) as error:
        raise UserError(f"no Ray at {address}: {one_line(error)}") from None


def _disconnect() -> None:
    if "ray" in sys.modules:
        with contextlib.suppress(Exception):
            sys.modules["ray"].shutdown()


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


def _end(processes: list[psutil.Process]) -> None:
    """End what is left of `processes`: first ask, then kill."""
    _, alive = psutil.wait_procs(processes, timeout=_END_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(alive, timeout=_END_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_END_S)
