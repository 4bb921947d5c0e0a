"""The demo's show: one answer with accepted draft tokens marked, then the same without drafts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from deploy.terminal import ChatClient, Marker

# Rewriting is where lookup drafting shines: the answer repeats most of the prompt.
PROMPT: Final = """\
Correct the spelling mistakes in this text and repeat the whole text:

The Amazon river carries more water than any other river in the world. It flows from the Andes \
mountains in Peru to the Atlantic ocean in Brazil. The Amazon rainforest around the river is \
home to millions of plants and animals. Many of the plants and animals in the Amazon rainforest \
live nowhere else in the world. The Amazon rainforest also makes much of the rain in Brazil."""

_FIELDS: Final[dict[str, Any]] = {"temperature": 0, "max_tokens": 160}
_CURL: Final = """\
curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
  "model": "{model}", "stream": true, "max_tokens": 64,
  "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'"""


def show(url: str, say: Callable[[str], None]) -> None:
    """Run the show against the server at `url`."""
    client = ChatClient(url)
    model = client.model()
    messages = [{"role": "user", "content": PROMPT}]
    marker = Marker(sys.stdout)
    # The first requests pay for allocations and caches; neither side of the comparison should.
    for enabled in (True, False):
        client.stream(messages, **{**_FIELDS, "max_tokens": 8}, speculation={"enabled": enabled})
    say(f"\n{PROMPT}\n\n--- {model}; {marker.legend} ---\n")
    fast = client.stream(messages, marker=marker, **_FIELDS)
    plain = client.stream(messages, **_FIELDS, speculation={"enabled": False})
    same = "the same text" if plain.text == fast.text else "NOT the same text (report this)"
    gain = fast.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0
    say(
        f"\n\nacceptance length    {fast.acceptance_length:.2f} tokens per step\n"
        f"with speculation     {fast.tokens_per_second:.1f} tokens/s\n"
        f"without (K = 0)      {plain.tokens_per_second:.1f} tokens/s, {same}\n"
        f"speed-up             {gain:.2f}x\n"
        f"\nServer: {url}\nTry:\n{_CURL.format(url=url, model=model)}"
    )
