"""What is said of a row besides its sample: log-probabilities, and what acceptance methods need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.sampling.noise import gumbel
from actors.sampling.processors import keys_of
from actors.sampling.rows import Columns, LogitsRow
from actors.sampling.scores import MASS_UNIT, kept_masses, masses
from actors.sampling.shards import ShardedScores, log_of
from actors.sampling.uniforms import Stream
from actors.steps.messages import Stat

_NEG_INF = float("-inf")


def logprob_columns(raw: ShardedScores, rows: Sequence[LogitsRow], sampled_N: Tensor) -> Columns:
    """LOGPROB, and TOP_IDS with TOP_LOGPROBS, where a request asks.

    Raw: log-softmax before masks and temperature. `sampled_N` is -1 for void rows.
    """
    wants = np.array([row.params.num_logprobs for row in rows])
    asked = np.flatnonzero(wants >= 0)
    if len(asked) == 0:
        return {}
    index = torch.from_numpy(asked).to(sampled_N.device)
    raw, sampled = raw.rows(index), sampled_N[index]
    top = raw.best()[0].float()
    total = raw.total_mass(torch.full_like(top, _NEG_INF), top)
    log_total = top.double() + log_of(total)
    found = raw.gather(sampled).double() - log_total
    logprobs = np.full(len(rows), np.nan, dtype=np.float32)
    logprobs[asked] = found.where(sampled >= 0, float("nan")).float().cpu().numpy()
    columns: Columns = {Stat.LOGPROB: logprobs}
    num_top = int(wants.max())
    if num_top > 0:
        values, ids = raw.top_n(num_top)
        values = (values.double() - log_total[:, None]).float()
        has_top = wants[asked] > 0
        for name, column in ((Stat.TOP_IDS, ids.int()), (Stat.TOP_LOGPROBS, values)):
            found_NT = column.cpu().numpy()
            columns[name] = np.zeros((len(rows), num_top), dtype=found_NT.dtype)
            columns[name][asked[has_top]] = found_NT[has_top]
    return columns


@dataclass(frozen=True)
class Law:
    """The processed law of N rows: softmax of the scores that reach `lowest_N`.

    `sampled_N`: the target's own samples. Greedy rows: all probability is on the sample.
    """

    scores: ShardedScores
    top_N: Tensor
    lowest_N: Tensor
    sampled_N: Tensor
    is_greedy_N: Tensor

    def rows(self, index: Tensor) -> Law:
        """These rows only."""
        return Law(
            self.scores.rows(index),
            self.top_N[index],
            self.lowest_N[index],
            self.sampled_N[index],
            self.is_greedy_N[index],
        )

    @cached_property
    def total_N(self) -> Tensor:
        """Mass of what is kept, int64 [N]."""
        return self.scores.total_mass(self.lowest_N, self.top_N)

    def probability(self, ids_N: Tensor) -> Tensor:
        """p of one token a row, float64 [N]."""
        scores = self.scores.gather(ids_N)[:, None]
        mass = kept_masses(scores, self.lowest_N, self.top_N)[:, 0]
        sure = (ids_N == self.sampled_N).double()
        return sure.where(self.is_greedy_N, mass.double() / self.total_N)

    def probabilities(self) -> Tensor:
        """p of this rank's columns, float64 [N, V]."""
        mass = kept_masses(self.scores.local.dense(), self.lowest_N, self.top_N)
        sure = one_hot(self.scores, self.sampled_N)
        return sure.where(self.is_greedy_N[:, None], mass.double() / self.total_N[:, None])

    def entropy(self, k: int) -> Tensor:
        """-sum(p ln p) over the `k` likeliest tokens, float64 [N]; greedy rows: at temperature 1,
        for the choice among near ties that it measures is there although it is not drawn."""
        values = self.scores.top_n(k)[0]
        logp = values.double() - (self.top_N.double() + log_of(self.total_N))[:, None]
        is_kept = (values >= self.lowest_N[:, None]) & (values > _NEG_INF)
        return -(logp.exp() * logp).where(is_kept, 0.0).sum(-1)


def one_hot(scores: ShardedScores, ids_N: Tensor) -> Tensor:
    """1 in the column of each row's token, float64 [N, V]."""
    return (scores.local.vocab.ids_V == ids_N[:, None]).double()


class DraftChecks:
    """Columns about rows that check a draft, of which an acceptance method needs some.

    Args:
        law: Of these rows.
        rows: All with a draft.
        q: float32 [N, this rank's columns], logits of the laws that the drafts were drawn from;
            None where a draft is certain.
        entropy_top_k: Likeliest tokens that ENTROPY sums over.
    """

    def __init__(
        self, law: Law, rows: Sequence[LogitsRow], q: Tensor | None, entropy_top_k: int
    ) -> None:
        self._law = law
        self._rows = rows
        self._group = law.scores.group
        self._ids = torch.tensor([row.draft_id for row in rows], device=law.top_N.device)
        self._q = q
        self._entropy_top_k = entropy_top_k

    def columns(self, needs: frozenset[Stat]) -> dict[Stat, Tensor]:
        """float64, or int64 for ids, one item a row. Every rank asks for the same."""
        made: dict[Stat, Callable[[], Tensor]] = {
            Stat.TARGET_PROB: lambda: self._law.probability(self._ids),
            Stat.DRAFT_PROB: self._draft_prob,
            Stat.RESIDUAL_MASS: lambda: self._residual[1],
            Stat.RESIDUAL_ID: self._residual_id,
            Stat.ENTROPY: lambda: self._law.entropy(self._entropy_top_k),
        }
        # In the order of this table, not of the set: ranks exchange numbers on the way.
        return {stat: make() for stat, make in made.items() if stat in needs}

    @cached_property
    def _draft_law(self) -> Tensor:
        """q of this rank's columns, float64 [N, V]."""
        if self._q is None:
            return one_hot(self._law.scores, self._ids)
        top = self._group.all_gather(self._q.max(-1).values).max(0).values
        mass = masses(self._q, top[:, None])
        return mass.double() / self._group.all_gather(mass.sum(-1)).sum(0)[:, None]

    def _draft_prob(self) -> Tensor:
        column = self._law.scores.local.vocab.columns(self._ids)
        found = self._draft_law.gather(1, column.clamp_min(0)[:, None])[:, 0]
        return self._group.all_gather(found.where(column >= 0, 0.0)).sum(0)

    @cached_property
    def _residual(self) -> tuple[Tensor, Tensor]:
        """max(p - q, 0) of this rank's columns, and its sum, which has no order: integers."""
        excess = (self._law.probabilities() - self._draft_law).clamp_min(0.0)
        total = (excess * MASS_UNIT).round().long().sum(-1)
        return excess, self._group.all_gather(total).sum(0).double() / MASS_UNIT

    def _residual_id(self) -> Tensor:
        excess, total = self._residual
        # p <= q everywhere up to rounding: only rounding rejects such a draft, and p replaces it.
        excess = excess.where(total[:, None] > 0, self._law.probabilities())
        keys = keys_of(self._rows, Stream.RESIDUAL, excess.device)
        noise = gumbel(keys[:, None], self._law.scores.local.vocab.ids_V)
        values, columns = (excess.log() + noise).max(-1)
        return self._law.scores.best_of(values, columns)[1]


def spread(stat: Stat, values: Tensor, index: Tensor, num_rows: int) -> npt.NDArray[Any]:
    """A column over all rows from that of rows `index`: NaN, or -1 for ids, elsewhere."""
    is_id = stat is Stat.RESIDUAL_ID
    column = np.full(num_rows, -1 if is_id else np.nan, dtype=np.int32 if is_id else np.float64)
    column[index.cpu().numpy()] = values.cpu().numpy()
    return column
