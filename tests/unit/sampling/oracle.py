"""The sampler's law once more, a row at a time and by sorting: what the fast code must agree with.

Also rows that are hard on it, and parameters of every kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.sampling.noise import gumbel
from actors.sampling.rows import LogitsRow
from actors.sampling.uniforms import row_key
from actors.steps.messages import SlotParams

LAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.3, "min_p": 0.1, "num_logprobs": 0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "num_logprobs": 4},
    {"temperature": 2.0, "top_p": 0.999, "num_logprobs": 2},
    {"min_tokens": 90, "masked_ids": (0, 7, 30), "num_logprobs": 3},
    {"temperature": 1.0, "top_k": 10_000},
    {"temperature": 1.5, "top_k": 200, "top_p": 0.95},
    {"temperature": 0.01},
]


def params(**kw: Any) -> SlotParams:
    return SlotParams(**{"slot": 0, "prompt_len": 4, "seed": 9, **kw})


def law_rows(count: int, first_law: int = 0, first_position: int = 4) -> list[LogitsRow]:
    """Rows of requests that cycle through LAWS, each at a position of its own."""
    return [
        LogitsRow(params(slot=i, seed=11 + i, **LAWS[(first_law + i) % len(LAWS)]), position)
        for i, position in enumerate(range(first_position, first_position + count))
    ]


def kept(logits: Tensor, p: SlotParams) -> Tensor:
    """Which tokens of one row's law survive the filters, bool [V]."""
    scores = logits / p.temperature
    keep = torch.ones_like(scores, dtype=torch.bool)
    if p.min_p > 0:
        keep &= scores >= scores.max() + float(np.log(p.min_p))
    if 0 < p.top_k < len(scores):
        keep &= scores >= scores.sort(descending=True).values[p.top_k - 1]
    if p.top_p < 1:
        ranked = scores[keep].sort(descending=True).values.double()
        mass = ((ranked - ranked[0]).exp() * 2**44).long()
        needed = int(np.ceil(float(mass.sum()) * p.top_p))
        last = min(int((mass.cumsum(0) < needed).sum()), len(ranked) - 1)
        keep &= scores >= ranked[last]
    return keep


def plain_sample(logits: Tensor, row: LogitsRow) -> int:
    """One row's sample."""
    logits = logits.clone()
    if row.is_masked:
        logits[list(row.params.masked_ids)] = float("-inf")
    if not logits.max().isfinite():
        return -1
    if row.is_greedy:
        return int(logits.argmax())
    scores = logits / row.params.temperature
    noise = gumbel(row_key(row.params.seed, row.position), torch.arange(len(scores)))
    noisy = scores.double() + noise
    return int(noisy.where(kept(logits, row.params), float("-inf")).argmax())


def hard_logits(seed: int, num_rows: int, vocab: int) -> Tensor:
    """Wide, flat and peaked rows, ties, values one rounding apart, rows of NaN and infinities."""
    rng = torch.Generator().manual_seed(seed)
    scale = [0.0, 0.3, 2.0, 6.0, 40.0, 1e-20][seed % 6]
    logits = torch.randn(num_rows, vocab, generator=rng) * scale
    if seed % 2:
        logits = (logits * 4).round() / 4
    if seed % 3 == 0:
        ids = torch.randint(vocab, (num_rows, 6), generator=rng)
        for i in range(num_rows):
            value = logits[i].max() + 0.5
            logits[i, ids[i]] = value
            towards = torch.tensor(float("inf" if i % 2 else "-inf"))
            logits[i, ids[i, 0]] = torch.nextafter(value, towards)
    if seed % 5 == 1:
        logits = logits.sort(-1, descending=bool(seed % 2)).values
    if seed % 7 == 3:
        logits[seed % num_rows, vocab - 1] = float("nan")
    if seed % 7 == 4:
        logits[seed % num_rows] = float("-inf")
    if seed % 7 == 5:
        logits[:, ::2] = float("-inf")
        logits[seed % num_rows, 1] = float("inf")
    return logits
