"""A drafter's module in small: the target's embedding, states and head, one layer of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from actors.model.inputs import EntryRows, SlotTables
from actors.model.kv import PagedAttention, PagedKV
from actors.model.paged_lm import PagedCausalLM
from actors.steps.messages import token_array

HEAD_DIM, NUM_HEADS = 16, 2
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class ToyHead(nn.Module):
    """Pairs of (state at p, embedding of the token at p + 1) to a state that the target's head
    reads. Attention is a function: paged when serving, dense when training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.join = nn.Linear(2 * width, width)
            self.qkv = nn.Linear(width, 3 * NUM_HEADS * HEAD_DIM)
            self.out = nn.Linear(NUM_HEADS * HEAD_DIM, width)

    def forward(self, states: Tensor, embedded: Tensor, attend: Attend) -> Tensor:
        x = self.join(torch.cat([embedded, states], -1))
        heads = self.qkv(x).unflatten(-1, (3, NUM_HEADS, HEAD_DIM))
        query, key, value = heads.permute(1, 2, 0, 3)[:, None]  # [1, heads, T, head_dim] each
        return x + self.out(attend(query, key, value).flatten(-2))


def attend_dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[T, heads, head_dim]: causal, over the whole sequence."""
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return out[0].transpose(0, 1)


@torch.inference_mode()
def served_logits(
    lm: PagedCausalLM, tables: SlotTables, slot: int, ids: list[int], sizes: list[int]
) -> Tensor:
    """The head's logits (this rank's) for all pairs of `ids`, beside a target that runs them in
    chunks of `sizes`; its KV lies in the target's block ids. The target needs `last` taps."""
    head = ToyHead(lm.model.config.hidden_size)
    layer = PagedAttention(NUM_HEADS, HEAD_DIM)
    kv = PagedKV([layer.geometry], lm.dtype, lm.device)
    kv.allocate(lm.kv.num_blocks, tables.block_size)
    found, start = [], 0
    for size in sizes:
        fed = token_array(ids[start : start + size])
        batch = tables.flatten([EntryRows(slot, start, fed, 0)], lm.device)
        taps = lm.forward(batch).taps
        assert taps is not None and taps.last is not None
        # A batch of at most 32 rows is not filled up: its rows are those of the states.
        own = tables.flatten([EntryRows(slot, start, fed, 0)], lm.device).over(kv).attention

        def attend(*qkv: Tensor, own: Any = own) -> Tensor:
            return layer(*qkv, own)[0]

        following = torch.tensor(ids[start + 1 : start + size + 1])
        found.append(lm.head(head(taps.last, lm.embed(following), attend)))
        start += size
    return torch.cat(found)


@torch.inference_mode()
def expected_logits(plain: Any, ids: list[int]) -> Tensor:
    """The same from transformers' model and dense attention."""
    states = plain(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states[-1][0]
    embedded = plain.get_input_embeddings()(torch.tensor(ids[1:]))
    head = ToyHead(plain.config.hidden_size)
    logits: Tensor = plain.lm_head(head(states, embedded, attend_dense))
    return logits
