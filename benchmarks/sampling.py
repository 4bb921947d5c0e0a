"""What sampling costs a step: the C kernel against the torch path that defines it.

    python -m benchmarks.sampling [--rows 5] [--vocabs 49152 151936] [--threads 2]

Milliseconds are the best of many calls, wall and processor time. The ratio is what to compare
between machines.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest import mock

import torch

from actors.sampling import native
from actors.sampling.rows import LogitsRow
from actors.sampling.sampler import Sampler
from actors.steps.messages import SlotParams
from parallel.groups import SingleRank

LAWS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "top_p 0.95, T 2": {"temperature": 2.0, "top_p": 0.95},
    "all filters": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    "logprobs": {"num_logprobs": 5},
}


def best_ms(call: Callable[[], object], num_calls: int) -> tuple[float, float]:
    """Least wall and processor milliseconds of a call."""
    wall, busy = [], []
    for _ in range(num_calls):
        started, worked = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - started)
        busy.append(time.process_time() - worked)
    return min(wall) * 1e3, min(busy) * 1e3


def main() -> None:
    """Measure every law and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--vocabs", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--calls", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.rows} rows, {args.threads} threads; ms wall (processor)")
    for vocab in args.vocabs:
        kernel = Sampler(SingleRank(), (0, vocab), vocab)
        with mock.patch.object(native, "load", lambda: None):
            plain = Sampler(SingleRank(), (0, vocab), vocab)
        # Roughly the shape of a language model's logits: a wide bulk and a few likely tokens.
        logits = torch.randn(args.rows, vocab, generator=torch.Generator().manual_seed(0)) * 3
        for name, law in LAWS.items():
            rows = [
                LogitsRow(SlotParams(slot=i, prompt_len=4, seed=i, **law), 9)  # type: ignore[arg-type]
                for i in range(args.rows)
            ]
            fast = best_ms(lambda: kernel.sample(logits, rows), args.calls)  # noqa: B023
            slow = best_ms(lambda: plain.sample(logits, rows), max(args.calls // 5, 3))  # noqa: B023
            print(
                f"{vocab:>7} {name:<16} kernel {fast[0]:7.3f} ({fast[1]:7.3f})   "
                f"torch {slow[0]:7.2f} ({slow[1]:7.2f})   ratio {slow[0] / fast[0]:5.1f}"
            )


if __name__ == "__main__":
    main()
