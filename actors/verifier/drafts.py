"""Checking that what a lookup drafter proposes can be fed to a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.steps.messages import Int32Array


def legal_prefix(draft_ids: Sequence[int], max_drafts: int, vocab_size: int) -> Int32Array:
    """The leading drafts that are token ids of the target, at most `max_drafts`.

    A draft outside the vocabulary would index an embedding out of range; drafts after it were
    conditioned on it and go too.
    """
    drafts = draft_ids[:max_drafts]
    for i, token_id in enumerate(drafts):
        if not 0 <= token_id < vocab_size:
            drafts = drafts[:i]
            break
    return np.asarray(drafts, dtype=np.int32)
