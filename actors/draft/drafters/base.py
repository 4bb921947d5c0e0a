"""What lookup drafters share: checking that what they propose can be fed to a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.messages import Int32Array


def legal_prefix(draft_ids: Sequence[int], max_drafts: int, vocab_size: int) -> Int32Array:
    """The leading drafts that are token ids of the target, at most `max_drafts`.

    A draft outside the vocabulary would index an embedding out of range; drafts after it were
    conditioned on it and go too.
    """
    drafts = np.asarray(draft_ids[:max_drafts], dtype=np.int64)
    illegal = (drafts < 0) | (drafts >= vocab_size)
    if illegal.any():
        drafts = drafts[: int(illegal.argmax())]
    return drafts.astype(np.int32)
