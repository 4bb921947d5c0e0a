"""Large rows of numbers between processes of one node: shared memory, with a socket as doorbell.

The memory has no name. Its writer tells others, in a message of a few bytes, which of its open
files to look at; when the last process that has it open ends, however it ends, the memory is free.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parallel.transport.frames import TransportError

Rows = npt.NDArray[np.float32]
_ITEM_BYTES = 4


class SharedRows(NamedTuple):
    """Where float32 rows are: file `fd` of process `pid`, from its start, row after row.

    They are columns `[first, first + num_columns)` of what the reader puts together.
    """

    pid: int
    fd: int
    num_rows: int
    first: int
    num_columns: int


class SharedWriter:
    """One writer's memory. It grows, and holds what was written last."""

    def __init__(self, name: str) -> None:
        self._fd: int | None = os.memfd_create(f"paceline-{name}")
        self._memory: mmap.mmap | None = None

    def write(self, rows: Rows, first: int = 0) -> SharedRows:
        """Put `rows` [n, C] in place of the last ones, which nobody may be reading any more.

        `first`: the column of a reader's rows that column 0 is.
        """
        assert self._fd is not None, "the writer is closed"
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        num_bytes = rows.nbytes
        if self._memory is None or len(self._memory) < num_bytes:
            if self._memory is not None:
                self._memory.close()
            os.ftruncate(self._fd, max(num_bytes, mmap.PAGESIZE))
            self._memory = mmap.mmap(self._fd, max(num_bytes, mmap.PAGESIZE))
        np.frombuffer(self._memory, np.float32, rows.size)[:] = rows.reshape(-1)
        return SharedRows(os.getpid(), self._fd, rows.shape[0], first, rows.shape[1])

    def close(self) -> None:
        """Idempotent. Readers that have the memory open keep it."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class SharedReader:
    """Reads rows of any writer of this node; keeps their memory mapped."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, int], mmap.mmap] = {}

    def read(self, where: SharedRows, begin: int, end: int) -> Rows:
        """A copy of columns `[begin, end)` of the reader's rows, as far as `where` has them.

        Raises:
            TransportError: the writer is gone or is on another node.
        """
        size = where.num_rows * where.num_columns
        rows = np.frombuffer(self._map(where, size * _ITEM_BYTES), np.float32, size)
        begin, end = (min(max(x - where.first, 0), where.num_columns) for x in (begin, end))
        return rows.reshape(where.num_rows, where.num_columns)[:, begin:end].copy()

    def _map(self, where: SharedRows, num_bytes: int) -> mmap.mmap:
        key = (where.pid, where.fd)
        known = self._memory.get(key)
        if known is not None and len(known) >= num_bytes:
            return known
        path = f"/proc/{where.pid}/fd/{where.fd}"
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise TransportError(
                f"shared rows of process {where.pid} cannot be opened here: {error}"
            ) from None
        try:
            if os.fstat(fd).st_size < num_bytes:
                raise TransportError(f"process {where.pid} shares less than it says")
            if known is not None:
                known.close()  # it has grown
            self._memory[key] = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        return self._memory[key]

    def close(self) -> None:
        """Idempotent."""
        for memory in self._memory.values():
            memory.close()
        self._memory = {}
