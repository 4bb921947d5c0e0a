"""From logits to row statistics: one law and one implementation, for any batch, shard and device.

A row's sample is `argmax(processed logits / T + Gumbel noise of its position)`, or the plain argmax
at temperature 0; ties go to the lowest id. Plain decoding is the case of one row a request, one
rank the case of a group of one. A row's results depend neither on the batch nor on the split.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.sampling.native import local_scores, vocabulary
from actors.sampling.processors import LogitsProcessor, MinTokens, RowLaws, keys_of, processed
from actors.sampling.rows import Columns, LogitsRow
from actors.sampling.shards import ShardedScores
from actors.sampling.statistics import DraftChecks, Law, logprob_columns
from actors.sampling.uniforms import Stream
from actors.steps.messages import INVALID_SAMPLE, RowMasks, Stat
from parallel.groups import TPGroup

DRAFT_CHECKS = frozenset(
    {
        Stat.TARGET_PROB,
        Stat.DRAFT_PROB,
        Stat.RESIDUAL_ID,
        Stat.RESIDUAL_MASS,
        Stat.ENTROPY,
    }
)


class Sampler:
    """Samples rows whose logits are split by vocabulary, and says of them what is asked.

    Args:
        group: Ranks that hold the vocabulary's parts.
        vocab: [begin, end) of this rank's columns.
        vocab_size: Columns that stand for a token; logits behind them are void.
        needs: Columns about drafts that the acceptance method asks for.
        id_map: int64 [vocab_size], the token of each column; -1 where it has none. None: a
            column's number is its token id.
        processors: A user's own, after those that are always there.
        entropy_top_k: Likeliest tokens that ENTROPY sums over.

    Raises:
        ValueError: `needs` names a column that is not about drafts.
    """

    def __init__(
        self,
        group: TPGroup,
        vocab: tuple[int, int],
        vocab_size: int,
        needs: frozenset[Stat] = frozenset(),
        id_map: Tensor | None = None,
        *,
        processors: Sequence[LogitsProcessor] = (),
        entropy_top_k: int = 3,
    ) -> None:
        if not needs <= DRAFT_CHECKS:
            raise ValueError(
                f"needs: {sorted(needs - DRAFT_CHECKS)} cannot be asked of a sampler; ask for any "
                f"of {sorted(DRAFT_CHECKS)}"
            )
        self._group = group
        self._vocab_size = vocab_size
        self._needs = needs
        self._processors: tuple[LogitsProcessor, ...] = (MinTokens(), *processors)
        self._entropy_top_k = entropy_top_k
        begin, end = vocab
        ids = torch.arange(vocab_size) if id_map is None else id_map.cpu()
        # A rank that holds padding only keeps one column, and no token.
        self._ids = (
            ids[begin : min(end, vocab_size)] if begin < vocab_size else ids.new_tensor([-1])
        )
        self._vocab = vocabulary(self._ids)

    @property
    def needs_history(self) -> bool:
        """Whether rows must carry the tokens before them."""
        return any(p.needs_history for p in self._processors)

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[LogitsRow],
        *,
        masks: RowMasks | None = None,
        q: Tensor | None = None,
    ) -> Columns:
        """Sample every row of `logits` [N, this rank's columns] (float32, only read).

        Every rank must call with rows of the same requests and positions; every rank gets the
        result: SAMPLED (INVALID_SAMPLE for rows that are not numbers), log-probabilities where a
        request asks, and the columns that were needed.

        Args:
            logits: As the model gave them.
            rows: What they are; one each.
            masks: Of a grammar; `masks.rows` count in `rows`.
            q: float32 [rows with a draft, this rank's columns], in row order: processed logits of
                the laws that the drafts were drawn from. None: drafts are certain (one-hot).
        """
        if not rows:
            return {Stat.SAMPLED: np.zeros(0, dtype=np.int32)}
        raw_logits = self._columns(logits)
        vocab = self._vocab
        changed = processed(raw_logits, rows, vocab, masks, self._processors)
        plain = ShardedScores(local_scores(changed, vocab), self._group)
        best, sampled, start = plain.best()
        is_valid = np.isfinite(best)
        sampled = np.where(is_valid, sampled, INVALID_SAMPLE)
        if not self._needs and all(row.is_plain for row in rows):
            return {Stat.SAMPLED: sampled.astype(np.int32)}

        laws = RowLaws.of(rows)
        scores = plain.rows(plain.local.index, laws.temperature)
        top = best / laws.temperature
        lowest = laws.lowest(scores, top, self._vocab_size)
        drawn = np.flatnonzero(~laws.is_greedy & is_valid)
        if len(drawn):
            keys = keys_of([rows[i] for i in drawn.tolist()], Stream.TARGET)
            sampled[drawn] = scores.rows(drawn).draw(keys, lowest[drawn], start[drawn])

        columns: Columns = {Stat.SAMPLED: sampled.astype(np.int32)}
        raw = plain
        if changed is not raw_logits:
            raw = ShardedScores(local_scores(raw_logits, vocab), self._group)
        columns.update(logprob_columns(raw, rows, sampled))
        if self._needs:
            law = Law(scores, top, lowest, sampled, laws.is_greedy)
            columns.update(self._draft_columns(law, rows, q))
        return columns

    def _columns(self, logits: Tensor) -> Tensor:
        """Logits of the columns that stand for tokens; adjacent in memory."""
        logits = logits[:, : len(self._ids)]
        if self._vocab.ids_V.device != logits.device:
            self._vocab = vocabulary(self._ids.to(logits.device))
        if self._vocab.void_V is not None:
            return logits.masked_fill(self._vocab.void_V, float("-inf"))
        return logits if logits.stride(1) == 1 else logits.contiguous()

    def _draft_columns(self, law: Law, rows: Sequence[LogitsRow], q: Tensor | None) -> Columns:
        """The needed columns: NaN, or -1 for ids, for rows without a draft or a law."""
        has_draft = np.array([row.draft_id >= 0 for row in rows])
        is_valid = law.sampled_N >= 0
        drafted = np.flatnonzero(has_draft & is_valid)
        if q is not None:
            q = self._columns(q)[torch.from_numpy(is_valid[has_draft]).to(q.device)]
        checks = DraftChecks(
            law.rows(drafted), [rows[i] for i in drafted.tolist()], q, self._entropy_top_k
        )
        found = checks.columns(self._needs) if len(drafted) else {}
        columns: Columns = {}
        for stat in self._needs:
            is_id = stat is Stat.RESIDUAL_ID
            column = np.full(len(rows), -1 if is_id else np.nan, np.int32 if is_id else np.float64)
            if len(drafted):
                column[drafted] = found[stat]
            columns[stat] = column
        return columns
