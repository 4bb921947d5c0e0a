"""Exact match against the target's own sample ("coupled" verification).

The target draws its token with the noise of that position whether or not a draft is there; a
draft survives iff it is that token. What is emitted never depends on the drafts, so output is
that of plain decoding, token for token, for any drafter and any K.
"""

from __future__ import annotations

import numpy as np

from actors.acceptance.base import Verdict, VerifyRows


def accept_exact(rows: VerifyRows) -> Verdict:
    """Accept each request's longest prefix of drafts that the target sampled itself."""
    num_drafts = rows.num_drafts
    num_reqs = len(num_drafts)
    first_row = np.zeros(num_reqs, dtype=np.int32)
    np.cumsum(num_drafts[:-1] + 1, out=first_row[1:])
    if len(rows.draft_ids) == 0:
        return Verdict(np.zeros(num_reqs, dtype=np.int32), rows.sampled[first_row])

    k = int(num_drafts.max())
    columns = np.arange(k, dtype=np.int32)
    is_draft = columns < num_drafts[:, None]  # [num_reqs, K]
    drafts = np.full((num_reqs, k), -1, dtype=np.int32)
    drafts[is_draft] = rows.draft_ids
    # Padded columns may point past the last row; -1 matches no sample, so any row will do.
    row = np.minimum(first_row[:, None] + columns, len(rows.sampled) - 1)
    hits = drafts == rows.sampled[row]
    num_accepted = np.cumprod(hits, axis=1, dtype=np.int32).sum(axis=1, dtype=np.int32)
    return Verdict(num_accepted, rows.sampled[first_row + num_accepted])
