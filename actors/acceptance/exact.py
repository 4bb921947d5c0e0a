"""Exact match against the target's own sample ("coupled" verification).

The target draws its token with the noise of that position whether or not a draft is there; a
draft survives iff it is that token. What is emitted never depends on the drafts, so output is
that of plain decoding, token for token, for any drafter and any K.
"""

from __future__ import annotations

import numpy as np

from actors.acceptance.base import Verdict, VerifyRows
from actors.steps.messages import Stat


class ExactMatch:
    """Accept each request's longest prefix of drafts that the target sampled itself."""

    needs: frozenset[Stat] = frozenset()

    def __call__(self, rows: VerifyRows) -> Verdict:
        num_drafts, sampled = rows.num_drafts, rows.sampled
        num_reqs = len(num_drafts)
        if num_reqs == len(sampled):  # nobody has a draft
            return Verdict(np.zeros(num_reqs, dtype=np.int32), sampled)
        first_row = np.zeros(num_reqs, dtype=np.int32)
        np.cumsum(num_drafts[:-1] + 1, out=first_row[1:])
        k = int(num_drafts.max())
        columns = np.arange(k, dtype=np.int32)
        is_draft = columns < num_drafts[:, None]  # [num_reqs, K]
        drafts = np.full((num_reqs, k), -1, dtype=np.int32)
        drafts[is_draft] = rows.draft_ids
        # Padded columns may point past the last row; -1 matches no sample, so any row will do.
        row = np.minimum(first_row[:, None] + columns, len(sampled) - 1)
        hits = drafts == sampled[row]
        num_accepted = np.cumprod(hits, axis=1, dtype=np.int32).sum(axis=1, dtype=np.int32)
        return Verdict(num_accepted, sampled[first_row + num_accepted])
