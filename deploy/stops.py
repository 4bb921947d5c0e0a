"""Ctrl-C and a service manager's stop, as one wish that never cuts a clean-up.

A signal is only noted, and whoever waits asks for it: an exception in the middle of Ray's own code
would leave processes and folders behind. Work of ours that may be cut at any point runs `open`.
A second signal a second later or more ends everything at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
# `timeout` and some shells send a signal to the process and then to its group: that is one wish.
_SAME_WISH_S: Final = 1.0
_POLL_S: Final = 0.2


class Stops:
    """The handler of SIGINT and SIGTERM of one command; a context that installs it.

    `end_at_once`: what to do before the process ends on a second signal.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.end_at_once: Callable[[], None] = lambda: None
        self._is_open = False
        self._is_ending = False
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stops:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Take the signals (again): Ray replaces handlers while it starts."""
        for number in self._before:
            signal.signal(number, self._on_signal)

    @property
    def code(self) -> int:
        """Exit code of a command that was stopped before it was ready: 130 or 143."""
        return 128 + (self.signum or signal.SIGINT)

    def check(self) -> None:
        """Raise KeyboardInterrupt when a signal has come."""
        if self.signum is not None:
            raise KeyboardInterrupt

    def sleep(self, seconds: float) -> None:
        """Wait; KeyboardInterrupt when a signal comes."""
        end = time.monotonic() + seconds
        while True:
            self.check()
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, _POLL_S))

    def wait(self) -> None:
        """Return when a signal comes."""
        while self.signum is None:
            time.sleep(_POLL_S)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """A signal raises KeyboardInterrupt at once inside the block."""
        self._is_open = True
        try:
            self.check()
            yield
        finally:
            self._is_open = False

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """The block is the clean-up: it ends by itself, unless a second signal comes."""
        self._is_ending = True
        yield

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        # Ray's own handler, where it came first, has set one that ends this process.
        signal.alarm(0)
        now = time.monotonic()
        if self.signum is None:
            self.signum, self._since = signum, now
            if self._is_open:
                self._is_open = False
                raise KeyboardInterrupt
            step = "Shutting down already" if self._is_ending else "Stopping"
            _tell(f"\n{step}; once more ends it at once\n")
        elif now - self._since >= _SAME_WISH_S:
            _tell("\nEnding at once\n")
            try:
                self.end_at_once()
            finally:
                os._exit(128 + signum)


def _tell(text: str) -> None:
    # Not through sys.stdout: the handler may have interrupted a write to it.
    with contextlib.suppress(OSError):
        os.write(1, text.encode())
