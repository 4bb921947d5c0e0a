"""One thread of a process computes, and OpenMP has one team there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.threads import COMPUTE_NAME, ComputeThread
from tests.tiny import write_tiny_model


def test_calls_run_in_order_and_hand_back_what_came_of_them() -> None:
    thread, seen = ComputeThread("test"), []
    pending = [thread.start(seen.append, i) for i in range(20)]
    assert thread.run(lambda a, *, b: a + b, 1, b=2) == 3
    assert seen == list(range(20)) and all(p.done() for p in pending)
    with pytest.raises(ZeroDivisionError):
        thread.run(lambda: 1 // 0)
    assert thread.is_alive
    thread.end()
    thread.join(5.0)
    assert not thread.is_alive


_SCRIPT = """
import os, sys, threading
from pathlib import Path
import numpy, torch
from actors.startup.in_process import build_in_process
from actors.requests import GenerateRequest
from specconfig import EngineArgs

def native():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

torch.set_num_threads(4)
before = native()
model = sys.argv[1]
config = EngineArgs(
    model=model, device="cpu", dtype="float32", max_model_len=128, max_num_seqs=2,
    compile_layers="on", num_threads=3,
    speculative_config={"method": "draft_model", "model": model, "num_speculative_tokens": 3},
).resolve()
engine = build_in_process(config)
loaded = native()
done = threading.Event()
runs = []
def sink(run):
    runs.append(run)
    if run.finish_reason is not None:
        done.set()
engine.add_request(
    GenerateRequest(request_id="a", prompt_token_ids=tuple(range(5, 60)), max_tokens=20), sink
)
assert done.wait(60)
# The compute thread is Python's; OpenMP gave it two more, and nobody else any.
assert loaded - before == 2 == native() - before, (before, loaded, native())
names = [p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")]
assert names.count(NAME) >= 3, names
engine.stop()
print("well", sum(len(run.token_ids) for run in runs))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_an_engine_in_this_process_has_one_team(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT.replace("NAME", repr(COMPUTE_NAME)), str(model)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        check=False,
    )
    assert found.returncode == 0 and "well 20" in found.stdout, found.stderr[-3000:]
