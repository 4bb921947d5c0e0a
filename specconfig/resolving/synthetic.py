"""Synthetic acceptance: fixed rates instead of the target's verdict, for load tests."""

from __future__ import annotations

import math


def rates_from_length(length: float, num_tokens: int) -> tuple[float, ...]:
    """Least-variance schedule whose mean output is ``length`` tokens per step.

    The first floor(length-1) drafts are always accepted, the next with the remainder, the rest
    never; the rates sum to ``length - 1``.
    """
    mean_accepted = length - 1.0
    certain = math.floor(mean_accepted)
    rates = [1.0] * certain + [mean_accepted - certain] + [0.0] * num_tokens
    return tuple(rates[:num_tokens])
