"""What was converted is kept by the file's identity, whole or not at all."""

from __future__ import annotations

import os
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from actors import conversions
from actors.conversions import drop, keep, kept, one_at_a_time


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "m.gguf"
    path.write_bytes(b"first")
    return path


def write(folder: Path) -> None:
    (folder / "weights").write_text("abc")


def places(file: Path) -> list[Path]:
    return [path for path in file.parent.glob("cache/gguf/*/*") if path.is_dir()]


def test_kept_until_the_file_changes(file: Path) -> None:
    assert kept(file, "weights") is None
    with one_at_a_time(file, "weights"):
        keep(file, "weights", 3, write)
    folder = kept(file, "weights")
    assert folder is not None and (folder / "weights").read_text() == "abc"
    assert kept(file, "tokenizer") is None
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert kept(file, "weights") is None
    # The new one takes the old one's place: nothing grows.
    keep(file, "weights", 3, write)
    assert kept(file, "weights") not in (None, folder) and not folder.exists()
    assert len(places(file)) == 1
    drop(file, "weights")
    assert kept(file, "weights") is None


def test_nothing_is_left_of_one_that_was_killed(file: Path) -> None:
    def die(folder: Path) -> None:
        (folder / "weights").write_text("half of")
        (folder / "more").mkdir()
        raise SystemExit

    with pytest.raises(SystemExit), one_at_a_time(file, "weights"):
        keep(file, "weights", 3, die)
    keep(file, "weights", 3, write)
    (folder,) = places(file)
    (folder.parent / ".weights-killed").mkdir()
    drop(file, "weights")
    keep(file, "weights", 3, write)
    assert places(file) == [folder] and kept(file, "weights") == folder


def test_what_another_has_kept_stays(file: Path) -> None:
    keep(file, "weights", 3, write)
    keep(file, "weights", 3, lambda folder: (folder / "weights").write_text("other") and None)
    folder = kept(file, "weights")
    assert folder is not None and (folder / "weights").read_text() == "abc"
    assert places(file) == [folder]


def test_two_processes_convert_one_after_the_other(file: Path) -> None:
    order: list[str] = []

    def convert(name: str) -> None:
        with one_at_a_time(file, "weights"):
            if kept(file, "weights") is None:
                order.append(name)
                keep(file, "weights", 3, write)

    threads = [threading.Thread(target=convert, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(order) == 1


def test_what_is_not_whole_is_not_used(file: Path) -> None:
    keep(file, "weights", 3, write)
    folder = kept(file, "weights")
    assert folder is not None
    (folder / "weights").write_text("ab")
    assert kept(file, "weights") is None

    def fail(folder: Path) -> None:
        write(folder)
        raise OSError("no space left")

    drop(file, "weights")
    keep(file, "weights", 3, fail)
    assert kept(file, "weights") is None and places(file) == []


def test_nothing_is_kept_where_it_cannot_be(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = namedtuple("usage", "free")(2**20)
    monkeypatch.setattr(conversions.shutil, "disk_usage", lambda path: usage)
    keep(file, "weights", 2**30, write)
    assert "needs 1024 MiB" in caplog.text and kept(file, "weights") is None
    monkeypatch.setenv("PACELINE_CACHE", str(file))  # a file: no folder can be made there
    with one_at_a_time(file, "weights"):
        keep(file, "weights", 3, write)
    assert "is converted again at each start" in caplog.text and kept(file, "weights") is None
