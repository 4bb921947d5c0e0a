"""Where a run of tokens ends: the only place that stops or trims output.

Everything that follows from the end (usage, log-probabilities, accepted flags, text, cache,
metrics) is cut at the token that this module names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from actors.requests import FinishReason
from actors.verifier.detokenize import StopMatch, TextStream


@dataclass(frozen=True, slots=True)
class FinishRules:
    """When a request ends. `max_tokens` already accounts for the end of the context.

    `eos_token_ids` is empty when EOS is ignored. Below `min_tokens` output tokens neither a stop
    id nor a stop string ends the request.
    """

    max_tokens: int
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop_in_text: bool = False
    ending_ids: frozenset[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Once: there may be as many stop ids as the vocabulary has.
        object.__setattr__(self, "ending_ids", self.eos_token_ids | self.stop_token_ids)


class RunEnd(NamedTuple):
    """The part of a run that counts. `text` is None where decoding is left for later."""

    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text: str | None = None


def end_run(
    rules: FinishRules, num_output_tokens: int, run: Sequence[int], text: TextStream | None
) -> RunEnd:
    """Find the first token of `run` after which the request is over.

    Args:
        rules: The request's.
        num_output_tokens: Output tokens before this run.
        run: New tokens, at least one: accepted drafts, then the recovered or bonus token.
        text: The request's text, advanced here only if it has stop strings: they can end the
            run, so their text cannot wait. Otherwise the caller decodes when it likes, by
            `decode_run`.
    """
    pieces: list[str] | None = [] if text is not None and text.has_stops else None
    stop_reason: int | str | None = None
    ending_ids = rules.ending_ids
    for i, token_id in enumerate(run):
        count = num_output_tokens + i + 1
        reason: FinishReason | None = None
        if count > rules.min_tokens and token_id in ending_ids:
            reason = FinishReason.STOP
            stop_reason = None if token_id in rules.eos_token_ids else token_id
        if pieces is not None and text is not None and not _is_silent(reason, rules):
            out = text.push_one(token_id, stop_enabled=count >= rules.min_tokens)
            if isinstance(out, StopMatch):
                pieces.append(out.text)
                return RunEnd(i + 1, FinishReason.STOP, out.stop, "".join(pieces))
            pieces.append(out)
        if reason is None and count >= rules.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            if pieces is not None and text is not None:
                pieces.append(text.flush())
            return RunEnd(i + 1, reason, stop_reason, None if pieces is None else "".join(pieces))
    return RunEnd(len(run), None, None, None if pieces is None else "".join(pieces))


def decode_run(
    rules: FinishRules, run: Sequence[int], reason: FinishReason | None, text: TextStream
) -> str:
    """Text of a run that `end_run` has cut, for requests without stop strings."""
    if _is_silent(reason, rules):
        run = run[:-1]
    out = text.push(run)
    return out if reason is None else out + text.flush()


def _is_silent(reason: FinishReason | None, rules: FinishRules) -> bool:
    """The token that ends a request by its id is no part of the text, unless asked for."""
    return reason is FinishReason.STOP and not rules.include_stop_in_text
