"""The `usage` object: the public fields, and `speculation` with this request's counters."""

from __future__ import annotations

from typing import Any

from actors.requests import RunOutput


def usage_of(output: RunOutput) -> dict[str, Any]:
    """Usage up to and with `output`, whose counts are totals."""
    spec = output.speculation
    drafted, accepted = spec.num_draft_tokens, spec.num_accepted_tokens
    return {
        "prompt_tokens": output.num_prompt_tokens,
        "completion_tokens": output.num_output_tokens,
        "total_tokens": output.num_prompt_tokens + output.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        "speculation": {
            "num_steps": spec.num_steps,
            "num_drafts": spec.num_drafts,
            "num_draft_tokens": drafted,
            "num_accepted_tokens": accepted,
            "acceptance_length": round(spec.acceptance_length, 4),
            "acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
            "num_accepted_tokens_per_pos": list(spec.num_accepted_tokens_per_pos),
        },
    }
