"""From an OpenAI request to the engine's request, with this server's limits checked."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from actors.errors import PromptTooLong
from actors.requests import GenerateRequest
from deploy.facts import ServedModel
from deploy.openai.errors import bad_request
from deploy.openai.protocol import Sampling


def to_generate_request(
    body: Sampling, prompt: Sequence[int], request_id: str, served: ServedModel
) -> GenerateRequest:
    """The engine's request.

    A seed is drawn when the client gave none: a request that moves to another replica must see
    the same noise there.

    Raises:
        ApiError, PromptTooLong: A value is outside what this server allows; both numbers are named.
    """
    _check(body, prompt, served)
    speculation = body.speculation
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        max_tokens=body.limit,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=max(0, body.top_k),  # -1 is another common way to write "off"
        top_p=body.top_p,
        min_p=body.min_p,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        stop=body.stops,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        num_logprobs=body.num_logprobs,
        speculation_enabled=speculation.enabled if speculation else True,
        num_speculative_tokens=speculation.num_speculative_tokens if speculation else None,
    )


def _check(body: Sampling, prompt: Sequence[int], served: ServedModel) -> None:
    if not prompt:
        raise bad_request("the prompt is empty", param="prompt")
    bad = next((token for token in prompt if token >= served.vocab_size), None)
    if bad is not None:
        raise bad_request(
            f"'prompt' holds token id {bad}, the vocabulary has {served.vocab_size} tokens",
            param="prompt",
        )
    if len(prompt) >= served.max_model_len:
        raise PromptTooLong(len(prompt), served.max_model_len)
    limit = body.limit
    if limit is not None and len(prompt) + limit > served.max_model_len:
        raise bad_request(
            f"the prompt has {len(prompt)} tokens and max_tokens is {limit}, together "
            f"{len(prompt) + limit}; this model's context holds {served.max_model_len} tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if body.num_logprobs > served.max_logprobs:
        raise bad_request(
            f"'{body.logprobs_field}' is {body.num_logprobs}, this server allows at most "
            f"{served.max_logprobs}",
            param=body.logprobs_field,
        )
    wanted = body.speculation.num_speculative_tokens if body.speculation else None
    if wanted is not None and wanted > served.num_speculative_tokens:
        raise bad_request(
            f"'speculation.num_speculative_tokens' is {wanted}, this server drafts at most "
            f"{served.num_speculative_tokens}",
            param="speculation.num_speculative_tokens",
        )
