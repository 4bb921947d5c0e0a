"""From an OpenAI request to the engine's request."""

from __future__ import annotations

from actors.checks import Names
from actors.requests import GenerateRequest
from deploy.openai.protocol import Sampling


def to_generate_request(body: Sampling, request_id: str) -> GenerateRequest:
    """The engine's request, without its prompt."""
    speculation = body.speculation
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=(),
        max_tokens=body.limit,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=max(0, body.top_k),  # -1 is another common way to write "off"
        top_p=body.top_p,
        min_p=body.min_p,
        seed=body.seed,
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        num_logprobs=body.num_logprobs,
        cache_salt=body.cache_salt,
        speculation_enabled=speculation.enabled if speculation else True,
        num_speculative_tokens=speculation.num_speculative_tokens if speculation else None,
    )


def names_of(body: Sampling) -> Names:
    """What the engine's fields are called in `body`."""
    return {
        "max_tokens": body.limit_field,
        "num_logprobs": body.logprobs_field,
        "num_speculative_tokens": "speculation.num_speculative_tokens",
    }
