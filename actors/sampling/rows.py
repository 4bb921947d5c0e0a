"""From logits to the target's own sample, row by row.

One row processor for every row: plain decoding is the case of one row a request. A row's sample
is `argmax(processed logits / T + Gumbel noise of that position)`, or the plain argmax at
temperature 0; ties go to the lowest id. Each row is handled on its own, so its bits do not depend
on the batch. Filters apply in this order: min_tokens mask, temperature, min_p, top_k, top_p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.sampling.noise import gumbel, row_key
from actors.steps.messages import INVALID_SAMPLE, Float32Array, Int32Array, SlotParams, Stat
from parallel.vocab import mass_needed, masses

# Below this a temperature means greedy, in target and draft alike.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """Whose row it is, and the position of the token that it samples.

    `draft_id`: the draft token that took this position, -1 where there is none (the bonus row).
    `index`: the row's place in its request's run, 0 for the first. `step`: of the plan.
    `history`: tokens before `position`, drafts of the run included, where the request's
    processors read them.
    """

    params: SlotParams
    position: int
    draft_id: int = -1
    index: int = 0
    step: int = 0
    history: Int32Array | None = None

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < GREEDY_TEMPERATURE

    @property
    def is_masked(self) -> bool:
        """Whether min_tokens still forbids ending at this position."""
        output_index = self.position - self.params.prompt_len
        return output_index < self.params.min_tokens and bool(self.params.masked_ids)


# By `Stat`, one item a logits row: what `RowStats` carries.
Columns = dict[str, npt.NDArray[Any]]


def sample_rows(logits: Tensor, rows: list[LogitsRow]) -> Columns:
    """Sample every row of `logits` [N, V] (float32; masks are applied in place).

    Log-probabilities are raw: log-softmax before masks and temperature.
    """
    num_rows = len(rows)
    wants = [row.params.num_logprobs for row in rows]
    num_top = max([w for w in wants if w > 0], default=0)
    logprobs = np.full(num_rows, np.nan, dtype=np.float32)
    top_ids = np.zeros((num_rows, num_top), dtype=np.int32)
    top_logprobs = np.zeros((num_rows, num_top), dtype=np.float32)

    raw: dict[int, Tensor] = {}
    for i, want in enumerate(wants):
        if want >= 0:
            raw[i] = logits[i : i + 1].log_softmax(-1)[0]
    for i, row in enumerate(rows):
        if row.is_masked:
            logits[i, list(row.params.masked_ids)] = float("-inf")

    best, chosen = logits.max(-1)
    finite = torch.isfinite(best)
    sampled = torch.where(finite, chosen, INVALID_SAMPLE).to(torch.int32)
    for i, row in enumerate(rows):
        if not row.is_greedy and finite[i]:
            sampled[i] = _sample_one(logits[i], row)
    ids = sampled.cpu().numpy()
    for i, table in raw.items():
        if ids[i] >= 0:
            logprobs[i] = float(table[int(ids[i])])
        if wants[i] > 0:
            values, indices = table.topk(num_top)
            top_ids[i] = indices.cpu().numpy()
            top_logprobs[i] = values.cpu().numpy()
    return columns(ids, logprobs, top_ids, top_logprobs)


def columns(
    sampled: Int32Array, logprobs: Float32Array, top_ids: Int32Array, top_logprobs: Float32Array
) -> Columns:
    """Columns of samples and, where a request asked, of log-probabilities."""
    found: Columns = {Stat.SAMPLED: sampled}
    if not np.isnan(logprobs).all():
        found[Stat.LOGPROB] = logprobs
    if top_ids.shape[1]:
        found[Stat.TOP_IDS], found[Stat.TOP_LOGPROBS] = top_ids, top_logprobs
    return found


def _sample_one(logits: Tensor, row: LogitsRow) -> int:
    scores, ids = processed_logits(logits, row.params)
    noise = gumbel(row_key(row.params.seed, row.position), ids)
    return int(ids[(scores.to(torch.float64) + noise).argmax()])


def processed_logits(logits: Tensor, params: SlotParams) -> tuple[Tensor, Tensor]:
    """Logits [V] after temperature and filters, as (scores [C], ids [C]) of the tokens kept.

    Softmax of the scores is the distribution that the request samples from. At least the most
    likely token survives. Ties at the top_k and top_p boundaries are all kept.
    """
    scores = logits / params.temperature
    ids = torch.arange(scores.shape[0], device=scores.device)
    keep: Tensor | None = None
    if params.min_p > 0.0:
        keep = scores >= scores.max() + float(np.log(params.min_p))
    if 0 < params.top_k < scores.shape[0]:
        kept = scores >= scores.topk(params.top_k).values[-1]
        keep = kept if keep is None else keep & kept
    if keep is not None:
        ids = keep.nonzero()[:, 0]
        scores = scores[ids]
    if params.top_p < 1.0:
        selected = _nucleus(scores, params.top_p)
        ids, scores = ids[selected], scores[selected]
    return scores, ids


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Which of the scores are among the likeliest tokens whose mass reaches top_p, as a mask.

    Masses are integers, as where the vocabulary is split over ranks, so that both agree. Ties at
    the boundary are all kept.
    """
    mass = masses(scores, scores.max()[None])
    needed = mass_needed(mass.sum(), torch.tensor(top_p, dtype=torch.float64, device=mass.device))
    size = scores.shape[0]
    # The nucleus is nearly always small: a short top-k first, a longer one only if needed.
    for k in (256, 4096, size):
        head = scores.topk(min(k, size))
        # Keep a token while the mass before it does not reach.
        reached = mass[head.indices].cumsum(-1)
        num_kept = int((reached < needed).sum()) + 1
        if num_kept < k or k >= size:
            return scores >= head.values[min(num_kept, len(head.values)) - 1]
    raise AssertionError("unreachable: the last head is the whole vocabulary")
