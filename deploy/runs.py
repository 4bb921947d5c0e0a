"""Runs of one request put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from actors.requests import RunOutput


def merge(outputs: Sequence[RunOutput]) -> RunOutput:
    """Consecutive runs of one request as one run."""
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    with_logprobs = [run.logprobs for run in outputs if run.logprobs is not None]
    return dataclasses.replace(
        last,
        token_ids=tuple(token for run in outputs for token in run.token_ids),
        text="".join(run.text for run in outputs),
        accepted=tuple(flag for run in outputs for flag in run.accepted),
        logprobs=(
            tuple(entry for entries in with_logprobs for entry in entries)
            if with_logprobs
            else None
        ),
    )
