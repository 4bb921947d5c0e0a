"""Processes of the contestants: one is started, asked and ended before the next."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

_POLL_S: Final = 0.5
_END_S: Final = 60.0


class PeerError(Exception):
    """A contestant did not start or answer; the others go on."""


class Process:
    """A process in a session of its own, gone with everything it started when it is ended."""

    def __init__(
        self, command: Sequence[str | Path], environment: Mapping[str, str], log: Path
    ) -> None:
        self._log = log
        with log.open("ab") as out:
            self.popen: subprocess.Popen[str] = subprocess.Popen(
                list(map(str, command)),
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self._reads_stdout else out,
                stderr=out,
                text=True,
                start_new_session=True,
            )

    _reads_stdout = False

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self.popen.poll() is None

    def fail(self, what: str) -> PeerError:
        """An error with the log's last line."""
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        return PeerError(f"{what}; {self._log.name} ends: {lines[-1][:300]}")

    def end(self) -> None:
        """Ask it to end, and after a minute no longer ask."""
        if self.popen.stdin is not None:
            with contextlib.suppress(OSError):
                self.popen.stdin.close()
        if self.is_alive():
            self.popen.send_signal(signal.SIGINT)
        try:
            self.popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        # What it left of its session; a server that ended well leaves nothing.
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


class ServerProcess(Process):
    """A server on a port of this machine."""

    def wait_healthy(self, url: str, seconds: float) -> None:
        """Return when `url` answers 200.

        Raises:
            PeerError: It ended, or took longer than `seconds`.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            if not self.is_alive():
                raise self.fail("the server ended before it was ready")
            if time.monotonic() > deadline:
                raise self.fail(f"the server was not ready after {seconds:g} s")
            time.sleep(_POLL_S)


class WorkerProcess(Process):
    """`worker.py` in some environment."""

    _reads_stdout = True

    def __init__(
        self, command: Sequence[str | Path], environment: Mapping[str, str], log: Path
    ) -> None:
        super().__init__(command, environment, log)
        self._lines: queue.Queue[str | None] = queue.Queue()
        assert self.popen.stdout is not None
        threading.Thread(target=self._read, args=(self.popen.stdout,), daemon=True).start()

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._lines.put(line)
        self._lines.put(None)

    def result(self, seconds: float) -> dict[str, Any]:
        """The next line that it says.

        Raises:
            PeerError: It ended, failed, or took longer than `seconds`.
        """
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise self.fail(f"the library took longer than {seconds:g} s") from None
        if line is None:
            raise self.fail("the library's process ended")
        result: dict[str, Any] = json.loads(line)
        if "error" in result:
            raise PeerError(str(result["error"]))
        return result

    def run(self, job: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Do a job; its result as `worker.py` says it."""
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(json.dumps(job) + "\n")
            self.popen.stdin.flush()
        except OSError:
            raise self.fail("the library's process ended") from None
        return self.result(seconds)
