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
from actors.sampling.scores import MASS_UNIT, Float64Array, kept_masses, masses
from actors.sampling.shards import ShardedScores, log_of
from actors.sampling.uniforms import Int64Array, Stream
from actors.steps.messages import Float32Array, Stat

_NEG_INF = np.float32("-inf")


def logprob_columns(
    raw: ShardedScores, rows: Sequence[LogitsRow], sampled_N: Int64Array
) -> Columns:
    """LOGPROB, and TOP_IDS with TOP_LOGPROBS, where a request asks.

    Raw: log-softmax before masks and temperature. `sampled_N` is -1 for rows without a sample.
    """
    wants = np.array([row.params.num_logprobs for row in rows])
    num_top = int(wants.max())
    if num_top < 0:
        return {}
    columns: Columns = {Stat.LOGPROB: np.full(len(rows), np.nan, dtype=np.float32)}
    if num_top > 0:
        columns[Stat.TOP_IDS] = np.zeros((len(rows), num_top), dtype=np.int32)
        columns[Stat.TOP_LOGPROBS] = np.zeros((len(rows), num_top), dtype=np.float32)
    asked = np.flatnonzero((wants >= 0) & (sampled_N >= 0))
    if len(asked) == 0:
        return columns
    top = raw.rows(asked).best()[0]
    # A mask may have hidden what is no number from the sample; the sum has it.
    asked, top = asked[np.isfinite(top)], top[np.isfinite(top)]
    if len(asked) == 0:
        return columns
    raw = raw.rows(asked)
    log_total = top + log_of(raw.total_mass(np.full_like(top, _NEG_INF), top))
    columns[Stat.LOGPROB][asked] = raw.gather(sampled_N[asked]) - log_total
    if num_top > 0:
        values, ids = raw.top_n(num_top)
        has_top = wants[asked] > 0
        columns[Stat.TOP_IDS][asked[has_top]] = ids[has_top]
        columns[Stat.TOP_LOGPROBS][asked[has_top]] = (values - log_total[:, None])[has_top]
    return columns


@dataclass(frozen=True)
class Law:
    """The processed law of N rows: softmax of the scores that reach `lowest_N`.

    `sampled_N`: the target's own samples. Greedy rows: all probability is on the sample.
    """

    scores: ShardedScores
    top_N: Float32Array
    lowest_N: Float32Array
    sampled_N: Int64Array
    is_greedy_N: npt.NDArray[np.bool_]

    def rows(self, index: Int64Array) -> Law:
        """These rows only."""
        return Law(
            self.scores.rows(index),
            self.top_N[index],
            self.lowest_N[index],
            self.sampled_N[index],
            self.is_greedy_N[index],
        )

    @cached_property
    def total_N(self) -> Int64Array:
        """Mass of what is kept."""
        return self.scores.total_mass(self.lowest_N, self.top_N)

    def probability(self, ids_N: Int64Array) -> Float64Array:
        """p of one token a row."""
        scores = self.scores.gather(ids_N)
        mass = self.scores.local.weigh(scores[:, None], self.top_N)[:, 0]
        drawn = np.where(scores >= self.lowest_N, mass, 0) / self.total_N
        found: Float64Array = np.where(self.is_greedy_N, ids_N == self.sampled_N, drawn)
        return found

    def probabilities(self) -> Tensor:
        """p of this rank's columns, float64 [N, V]."""
        scores = self.scores.local.dense()
        top, lowest, total, greedy = (
            torch.from_numpy(a).to(scores.device)
            for a in (self.top_N, self.lowest_N, self.total_N, self.is_greedy_N)
        )
        drawn = kept_masses(scores, lowest, top).double() / total[:, None]
        return one_hot(self.scores, self.sampled_N).where(greedy[:, None], drawn)

    def entropy(self, k: int) -> Float64Array:
        """-sum(p ln p) over the `k` likeliest tokens; greedy rows: at temperature 1, for the
        doubt that it measures is there although nothing is drawn."""
        values = self.scores.top_n(k)[0]
        logp = values - (self.top_N + log_of(self.total_N))[:, None]
        is_kept = (values >= self.lowest_N[:, None]) & (values > _NEG_INF)
        logp = np.where(is_kept, logp, 0.0)
        total: Float64Array = -np.where(is_kept, np.exp(logp) * logp, 0.0).sum(-1)
        return total


def one_hot(scores: ShardedScores, ids_N: Int64Array) -> Tensor:
    """1 in the column of each row's token, float64 [N, V]."""
    ids_V = scores.local.vocab.ids_V
    return (ids_V == torch.from_numpy(ids_N).to(ids_V.device)[:, None]).double()


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
        self._shard = law.scores
        self._ids = np.array([row.draft_id for row in rows], dtype=np.int64)
        self._q = q
        self._entropy_top_k = entropy_top_k

    def columns(self, needs: frozenset[Stat]) -> Columns:
        """One item a row: float64, or int64 for ids. Every rank asks for the same."""
        made: dict[Stat, Callable[[], npt.NDArray[Any]]] = {
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
            return one_hot(self._shard, self._ids)
        best = self._shard.from_all(self._q.max(-1).values.cpu().numpy()).max(0)
        mass = masses(self._q, torch.from_numpy(best).to(self._q.device)[:, None])
        total = self._shard.from_all(mass.sum(-1).cpu().numpy()).sum(0)
        return mass.double() / torch.from_numpy(total).to(mass.device)[:, None]

    def _draft_prob(self) -> Float64Array:
        column = self._shard.local.vocab.columns(self._ids)
        places = torch.from_numpy(column.clip(0)[:, None]).to(self._draft_law.device)
        found = self._draft_law.gather(1, places)[:, 0].cpu().numpy()
        total: Float64Array = self._shard.from_all(np.where(column >= 0, found, 0.0)).sum(0)
        return total

    @cached_property
    def _residual(self) -> tuple[Tensor, Float64Array]:
        """max(p - q, 0) of this rank's columns, and its sum, which has no order: integers."""
        excess = (self._law.probabilities() - self._draft_law).clamp_min(0.0)
        total = (excess * MASS_UNIT).round().long().sum(-1)
        return excess, self._shard.from_all(total.cpu().numpy()).sum(0) / MASS_UNIT

    def _residual_id(self) -> Int64Array:
        excess, total = self._residual
        # p <= q everywhere up to rounding: only rounding rejects such a draft, and p replaces it.
        is_left = torch.from_numpy(total > 0).to(excess.device)
        excess = excess.where(is_left[:, None], self._law.probabilities())
        keys = torch.from_numpy(keys_of(self._rows, Stream.RESIDUAL)).to(excess.device)
        noise = gumbel(keys[:, None], self._shard.local.vocab.ids_V)
        values, columns = (excess.log() + noise).max(-1)
        ids = self._shard.best_of(values.cpu().numpy(), columns.cpu().numpy())[1]
        return ids
