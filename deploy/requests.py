"""From what a caller asks, on whichever surface, to a request an engine takes."""

from __future__ import annotations

import dataclasses
import itertools

from actors.checks import Names, check_prompt, check_sampling
from actors.errors import InvalidRequest
from actors.requests import GenerateRequest, drawn_seed
from deploy.facts import ServedModel
from deploy.text import Prompt, TextProcessor


class Seeds:
    """Seeds for requests that bring none: fresh, or following from the server's own seed.

    The surface draws them, not the engine: a request that moves to another replica must see the
    same noise there. Each process of a surface counts the requests that it takes.
    """

    def __init__(self, base: int | None) -> None:
        self._base = base
        self._numbers = itertools.count()

    def draw(self) -> int:
        """The next request's seed."""
        return drawn_seed(self._base, next(self._numbers))


def complete_request(
    request: GenerateRequest,
    prompt: Prompt,
    text: TextProcessor,
    served: ServedModel,
    seeds: Seeds,
    names: Names | None = None,
) -> GenerateRequest:
    """`request` with the prompt's token ids and a seed, checked against the server's limits.

    Tokenising a long prompt takes tens of milliseconds.

    Args:
        request: Without a prompt.
        prompt: What to go on from.
        text: Of the served model.
        served: Its limits.
        seeds: For a caller that gave none.
        names: The surface's names of the engine's fields, where they differ.

    Raises:
        InvalidRequest: a value is outside what this server allows; both numbers are named.
        PromptTooLong: no room for one output token.
    """
    names = names or {}
    check_sampling(request, served, names)
    _check_drafts(request, served, names)
    request = dataclasses.replace(
        request,
        prompt_token_ids=text.ids_of(prompt, served.max_model_len),
        seed=seeds.draw() if request.seed is None else request.seed,
    )
    check_prompt(request, served, names)
    _check_room(request, served, names)
    return request


# An engine lowers these two to what it has. A caller is told instead: it wrote the number itself.


def _check_drafts(request: GenerateRequest, served: ServedModel, names: Names) -> None:
    wanted, limit = request.num_speculative_tokens, served.num_speculative_tokens
    if wanted is not None and wanted > limit:
        named = names.get("num_speculative_tokens", "num_speculative_tokens")
        raise InvalidRequest(
            f"'{named}' is {wanted}, this server drafts at most {limit}", param=named
        )


def _check_room(request: GenerateRequest, served: ServedModel, names: Names) -> None:
    prompt_len, limit = len(request.prompt_token_ids), request.max_tokens
    if limit is not None and prompt_len + limit > served.max_model_len:
        named = names.get("max_tokens", "max_tokens")
        raise InvalidRequest(
            f"the prompt has {prompt_len} tokens and {named} is {limit}, together "
            f"{prompt_len + limit}; this model's context holds {served.max_model_len} tokens",
            param=named,
            code="context_length_exceeded",
        )
