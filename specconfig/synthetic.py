"""Synthetic acceptance: fixed rates instead of the target's verdict, for load tests."""

from __future__ import annotations

import math
from collections.abc import Sequence


def rates_from_length(length: float, num_tokens: int) -> tuple[float, ...]:
    """Least-variance schedule whose mean output is ``length`` tokens per step.

    The first floor(length-1) drafts are always accepted, the next with the remainder, the rest
    never; the rates sum to ``length - 1``.
    """
    mean_accepted = length - 1.0
    certain = math.floor(mean_accepted)
    rates = [1.0] * certain + [mean_accepted - certain] + [0.0] * num_tokens
    return tuple(rates[:num_tokens])


def conditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """P(draft i accepted | all before it were); 0 once nothing can be accepted."""
    conditional = []
    previous = 1.0
    for rate in rates:
        conditional.append(rate / previous if previous > 0 else 0.0)
        previous = rate
    return tuple(conditional)
