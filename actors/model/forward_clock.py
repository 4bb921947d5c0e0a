"""How long a model's device computes no forward of it."""

from __future__ import annotations

import time

import torch


class ForwardClock:
    """Measures from the end of each forward to the start of the next.

    On CPU by the host's clock; on CUDA, where a forward runs behind the host's back, by events in
    the stream, so both ends are where the device is.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._ended: float | torch.cuda.Event | None = None
        self._gap: tuple[float | torch.cuda.Event, float | torch.cuda.Event] | None = None

    def begin(self) -> None:
        """A forward starts: its inputs are there."""
        self._gap = None if self._ended is None else (self._ended, self._now())

    def end(self) -> None:
        """It has been run, or, on CUDA, put into the stream."""
        self._ended = self._now()

    def gap_ms(self) -> float | None:
        """Between the last forward and the one before; None where there was none before, or where
        the device has not come that far."""
        if self._gap is None:
            return None
        before, after = self._gap
        if isinstance(before, float) and isinstance(after, float):
            return (after - before) * 1e3
        assert isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event)
        return before.elapsed_time(after) if after.query() else None

    def _now(self) -> float | torch.cuda.Event:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
