"""The GPU script, as far as a CPU can run it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu_check import BUDGETS, SECTIONS, Context, failures, run_apart

ROOT = Path(__file__).parents[3]


def test_dry_run_on_the_cpu_measures_everything_and_finds_nothing_wrong(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = subprocess.run(
        [ROOT / "benchmarks" / "gpu_check.sh", "--cpu", path],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    report = json.loads(path.read_text())
    assert list(report["sections"]) == list(SECTIONS) and report["failures"] == []
    assert report["sections"]["two_processes"]["colocated"]["ok"]
    assert report["sections"]["engine"]["draft model K=4"]["ok"]
    graphs = report["sections"]["speed_1b"]["graphs"]
    differences = [g["static_attention_max_difference"] for g in graphs.values() if type(g) is dict]
    assert differences and max(differences) < 1e-4


def test_the_sections_fit_six_minutes_together() -> None:
    assert set(BUDGETS) == set(SECTIONS)
    assert sum(BUDGETS.values()) <= 350


def test_a_section_that_hangs_is_killed_and_says_so() -> None:
    started = time.monotonic()
    found = run_apart("two_processes", "cpu", 1.0)
    assert found["ended"] == "killed after 1 s"
    assert time.monotonic() - started < 10
    assert failures({"two_processes": found}) == ["two_processes"]


def test_what_was_measured_before_a_failure_is_kept(tmp_path: Path) -> None:
    ctx = Context("cpu", tmp_path / "s.json", 60)
    ctx.attempt("good", lambda: {"ok": True})
    ctx.attempt("bad", lambda: 1 / 0)
    found = json.loads((tmp_path / "s.json").read_text())
    assert found["good"] == {"ok": True} and "ZeroDivisionError" in found["bad"]["error"]
    assert failures(found) == ["bad"]


@pytest.mark.parametrize("part", ["benchmarks/gpu_check.sh", "benchmarks/gpu_check.py"])
def test_it_says_that_it_was_never_run_on_a_gpu(part: str) -> None:
    head = (ROOT / part).read_text()[:900].lower()
    assert "never run on a gpu" in head
