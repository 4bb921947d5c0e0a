"""What was made of a file with much work, kept for the next start.

Reading a GGUF file's tokenizer builds an object for each entry of its vocabulary, 10 s and more for
262,144 of them. Results lie in `<cache>/gguf`, by the file's
identity; an older version of the same file is dropped when a newer one comes. All of it may be
deleted at any time. Where the folder cannot be written, everything is made anew each time.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from actors.threads import cache_dir

logger = logging.getLogger(__name__)

_FORMAT = 1
_MANIFEST = "paceline.json"  # sizes of the files beside it
_HEAD_BYTES = 2**20
_SPARE_BYTES = 2**28


def kept(file: Path, what: str) -> Path | None:
    """Folder with `what` was made of `file` as it is now; None when there is none, or not whole."""
    try:
        folder = _place(file, what)
        sizes: dict[str, int] = json.loads((folder / _MANIFEST).read_text())
        is_whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return None
    return folder if is_whole else None


def keep(file: Path, what: str, num_bytes: int, write: Callable[[Path], None]) -> None:
    """Have `what` was made of `file` written into a folder, about `num_bytes`, and keep it.
    Inside `one_at_a_time`.

    Others see all of it or nothing. Where it cannot be kept, the log says why.
    """
    scratch: Path | None = None
    try:
        folder = _place(file, what)
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < num_bytes + _SPARE_BYTES:
            logger.warning(
                "%s is converted again at each start: keeping %s needs %d MiB, %s has %d MiB free",
                file, what, num_bytes >> 20, folder.parent, free >> 20,
            )  # fmt: skip
            return
        for left in folder.parent.glob(f".{what}-*"):  # of one that was killed meanwhile
            shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{what}-", dir=folder.parent))
        write(scratch)
        sizes = {p.name: p.stat().st_size for p in scratch.iterdir()}
        (scratch / _MANIFEST).write_text(json.dumps(sizes))
        if kept(file, what) is not None:  # another was quicker
            return
        for old in folder.parent.glob(f"{what}-*"):
            shutil.rmtree(old, ignore_errors=True)
        scratch.rename(folder)
        logger.info("%s: %s kept in %s; delete it to clear", file, what, folder)
    except OSError as error:
        logger.warning("%s is converted again at each start: %s", file, error)
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def drop(file: Path, what: str) -> None:
    """Forget `what` was made of `file`."""
    shutil.rmtree(_place(file, what), ignore_errors=True)


@contextmanager
def one_at_a_time(file: Path, what: str) -> Iterator[None]:
    """Wait while another process makes `what` of `file`: memory for it is needed once."""
    try:
        folder = _place(file, what).parent
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f".{what}.lock").open("w")
    except OSError:  # not writable: `keep` will say so
        yield
        return
    with lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _place(file: Path, what: str) -> Path:
    path = file.resolve()
    stat = path.stat()
    with path.open("rb") as opened:
        head = hashlib.sha256(opened.read(_HEAD_BYTES)).hexdigest()
    made_by = importlib.metadata.version("transformers")
    identity = f"{stat.st_size} {stat.st_mtime_ns} {head} {made_by} {_FORMAT}"
    folder = cache_dir() / "gguf" / f"{path.stem}-{_short(str(path))}"
    return folder / f"{what}-{_short(identity)}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
