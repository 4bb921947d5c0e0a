"""What a section of `gpu_check` measures with and writes to. Imports nothing that may break."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = dict[str, Any]


class Context:
    """What a section needs: device, sizes, and a place for results that survives its end."""

    def __init__(self, device: str, path: Path | None, budget_s: float) -> None:
        self.device = device
        self.is_cpu = device == "cpu"
        self.result: Report = {}
        self._path = path
        self._deadline = time.monotonic() + budget_s

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def put(self, name: str, value: Any) -> None:
        self.result[name] = value
        if self._path is not None:
            write_json(self._path, self.result)

    def attempt(self, name: str, measure: Callable[[], Any], needs_s: float = 2.0) -> Any:
        """Store what `measure` returns, or why it could not."""
        if self.left_s < needs_s and not self.is_cpu:
            self.put(name, {"skipped": f"{self.left_s:.0f} s left"})
            return None
        try:
            value = measure()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:400]
            where = f"{Path(last.filename).name}:{last.lineno}"
            self.put(name, {"error": f"{type(error).__name__}: {text}", "at": where})
            return None
        self.put(name, value)
        return value


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1, default=str) + "\n")
    part.replace(path)


def timed(run: Callable[[], Any], ctx: Context, repeats: int) -> float:
    """Median seconds of one call; the device is idle before and after each."""
    import torch

    def wait() -> None:
        if not ctx.is_cpu:
            torch.cuda.synchronize()

    run()
    wait()
    samples = []
    for _ in range(2 if ctx.is_cpu else repeats):
        started = time.perf_counter()
        run()
        wait()
        samples.append(time.perf_counter() - started)
    return sorted(samples)[len(samples) // 2]
