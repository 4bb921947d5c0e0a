"""Paged attention as transformers' modeling code calls it: `attn_implementation` by this name.

Modeling code hands on what the model was called with, so the batch arrives as keyword arguments,
tensor by tensor: a compiled layer is a function of tensors. `discovery` has checked that a layer
asks for nothing else.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from actors.model.attention_torch import GatherPlan
from actors.model.kv import AttentionBatch, PagedCache, attend

ATTENTION_NAME = "paceline_paged"


def batch_arguments(batch: AttentionBatch) -> dict[str, Any]:
    """`batch` as keyword arguments of the model."""
    arguments: dict[str, Any] = {
        "query_start": batch.query_start,
        "seq_lens": batch.seq_lens,
        "block_table": batch.block_table,
        "slots": batch.slots,
    }
    if batch.gather is not None:
        arguments["gather"] = batch.gather
    return arguments


def _paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slots: Tensor,
    gather: GatherPlan | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    del attention_mask, others
    cache: PagedCache = module.paged_cache  # type: ignore[assignment]
    batch = AttentionBatch(query_start, seq_lens, block_table, slots, gather=gather)
    out = attend(
        cache, query, key, value, batch, scale=scaling, softcap=softcap or 0.0, sinks=s_aux
    )
    return out, None


def register() -> None:
    """Make `attn_implementation="paceline_paged"` known to transformers. Idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _paged)
