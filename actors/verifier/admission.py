"""Checks of a request before it is queued, and what the loop keeps of it."""

from __future__ import annotations

from actors.checks import check_prompt, check_sampling
from actors.errors import InvalidRequest
from actors.requests import GenerateRequest
from actors.verifier.detokenize import TextStream, TokenText
from actors.verifier.finish import FinishRules
from actors.verifier.limits import EngineLimits


def admit(
    params: GenerateRequest, limits: EngineLimits, tokens: TokenText | None
) -> tuple[FinishRules, TextStream | None]:
    """The request's rules for ending and its output text, if this replica can serve it.

    Raises:
        InvalidRequest: with the field in `param`.
        PromptTooLong: the prompt leaves no room for one output token.
    """
    check_prompt(params, limits)
    check_sampling(params, limits)
    prompt_len = len(params.prompt_token_ids)
    if not limits.enable_chunked_prefill and prompt_len > limits.max_num_batched_tokens:
        raise InvalidRequest(
            f"the prompt has {prompt_len} tokens, but max_num_batched_tokens is "
            f"{limits.max_num_batched_tokens} and enable_chunked_prefill is false, so a prompt "
            f"must fit one step; shorten the prompt or enable chunked prefill",
            param="prompt",
        )
    max_tokens = limits.max_model_len - prompt_len
    if params.max_tokens is not None:
        max_tokens = min(max_tokens, params.max_tokens)
    rules = FinishRules(
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        eos_token_ids=frozenset(() if params.ignore_eos else limits.eos_token_ids),
        stop_token_ids=frozenset(params.stop_token_ids),
        include_stop_in_text=params.include_stop_str_in_output,
    )
    text = None
    if tokens is not None:
        detokenizer = tokens.decoder_of(params)
        text = TextStream(detokenizer, params.stop, params.include_stop_str_in_output)
    elif params.stop:
        raise InvalidRequest("stop strings need a tokenizer; this server has none", param="stop")
    return rules, text
