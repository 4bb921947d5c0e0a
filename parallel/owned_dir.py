"""Temporary folders that belong to a process, and can be told from those of a dead one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "owner"


class OwnedDir:
    """A private folder, removed by `close`, or by `remove_ownerless` once its process is gone.

    Its file `owner` stays locked while the process lives, so neither a process id that is used
    again nor another container on the same disk confuses the two.
    """

    def __init__(self, prefix: str, parent: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        new = self.path / f"{_LOCK}.new"
        self._lock = new.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Nobody sees it under its name before it is locked.
        new.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_ownerless(prefix: str, parent: str) -> None:
    """Remove folders of `OwnedDir` whose process ended without doing so. Others are not touched."""
    for path in Path(parent).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
