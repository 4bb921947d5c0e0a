"""Attention over paged KV, plugged into transformers' modeling code.

A step's rows of all requests are flattened to one sequence `[1, T]`; what belongs together is in
`AttentionBatch`. Modeling code calls the attention interface with `[1, heads, T, head_dim]` and
gets `[1, T, heads, head_dim]` back. The op writes the new keys and values into their slots first,
then attends, so rows of one request see each other causally through the cache.

Two implementations behind one op: the C kernel (CPU, float32; a row's bits depend on its own
position only), and SDPA over gathered blocks (any device and dtype).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from actors.native.build import AttentionKernels, load_kernels

ATTENTION_NAME = "paceline_paged"


class UnsupportedAttention(NotImplementedError):
    """A layer's attention needs something that this module does not compute."""


@dataclass(frozen=True)
class AttentionBatch:
    """Where each row of a flattened batch sits. All on the model's device.

    query_start int32 [R + 1], seq_lens int32 [R] (keys incl. this step's rows), block_table int32
    [R, max_blocks], slots int64 [T] (block id * block_size + offset, -1 for a padding row).
    """

    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slots: Tensor


@dataclass(frozen=True)
class KVGeometry:
    """What one attention layer caches for a token: `num_kv_heads` keys and values of `head_dim`.

    A position sees the last `window` positions, itself included; 0: all of them.
    """

    module: nn.Module
    num_kv_heads: int
    head_dim: int
    window: int


class PagedCache(nn.Module):
    """One attention layer's KV tensors; lives on the attention module as `paged_cache`.

    Keys [num_blocks, kv_heads, head_dim, block_size] (transposed, so that one vector holds one
    dimension of several positions), values [num_blocks, kv_heads, block_size, head_dim]. `window`
    as in `KVGeometry`. `exact` False lets long prompt chunks take the faster path whose bits depend
    on the chunk.
    """

    keys: Tensor
    values: Tensor

    def __init__(
        self,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool = True,
        window: int = 0,
    ) -> None:
        super().__init__()
        self.exact = exact
        self.window = window
        # Zeros, not empty: the SDPA path multiplies masked values by weight 0, and 0 * NaN is NaN.
        keys = torch.zeros(
            num_blocks, num_kv_heads, head_dim, block_size, dtype=dtype, device=device
        )
        values = torch.zeros(
            num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype, device=device
        )
        self.register_buffer("keys", keys, persistent=False)
        self.register_buffer("values", values, persistent=False)

    @property
    def num_bytes(self) -> int:
        return (self.keys.numel() + self.values.numel()) * self.keys.element_size()


# From this many rows on, SDPA's matrix products beat the kernel's row at a time.
_GEMM_ROWS = 128

_LIB = torch.library.Library("paceline", "DEF")
_LIB.define(
    "paged_attention(Tensor query, Tensor key, Tensor value, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor query_start, Tensor seq_lens, Tensor block_table, Tensor slots, "
    "float scale, float softcap, int window, bool exact, Tensor? sinks=None) -> Tensor"
)


def native_kernels(k_cache: Tensor) -> AttentionKernels | None:
    """The C kernels for this cache, or None when the torch path must serve it."""
    if k_cache.device.type != "cpu" or k_cache.dtype != torch.float32:
        return None
    return load_kernels(k_cache.shape[2], k_cache.shape[3])


def _paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slots: Tensor,
    scale: float,
    softcap: float,
    window: int,
    exact: bool,
    sinks: Tensor | None = None,
) -> Tensor:
    kernels = native_kernels(k_cache)
    if kernels is None or (not exact and query.shape[2] >= _GEMM_ROWS):
        return paged_attention_torch(
            query, key, value, k_cache, v_cache, query_start, seq_lens, block_table, slots,
            scale, softcap, window, sinks,
        )  # fmt: skip
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    # The kernel reads rows through strides but needs head_dim contiguous.
    query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    out = query.new_empty(1, num_rows, num_heads, head_dim)
    kernels.write_kv(
        key.data_ptr(), value.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), slots.data_ptr(),
        num_rows, num_kv_heads, key.stride(2), key.stride(1), value.stride(2), value.stride(1),
    )  # fmt: skip
    status = kernels.paged_attention(
        query.data_ptr(), out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
        block_table.data_ptr(), query_start.data_ptr(), seq_lens.data_ptr(), seq_lens.shape[0],
        block_table.shape[1], num_heads, num_kv_heads, query.stride(2), query.stride(1),
        None if sinks is None else sinks.contiguous().data_ptr(),
        scale, softcap, window, torch.get_num_threads(),
    )  # fmt: skip
    if status != 0:
        raise MemoryError("paged attention: no scratch memory")
    return out


def paged_attention_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slots: Tensor,
    scale: float,
    softcap: float,
    window: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same result with torch ops: gather each request's blocks, one padded SDPA for all.

    Slower and, because GEMM kernels depend on the number of rows, equal only up to rounding. The
    oracle of the C kernel, and the path for other devices and dtypes.
    """
    num_heads, head_dim = query.shape[1], query.shape[3]
    block_size = k_cache.shape[3]
    real = slots >= 0
    blocks, offsets = slots[real] // block_size, slots[real] % block_size
    k_cache[blocks, :, :, offsets] = key[0].transpose(0, 1)[real]
    v_cache[blocks, :, offsets] = value[0].transpose(0, 1)[real]

    num_reqs = seq_lens.shape[0]
    q_lens = (query_start[1:] - query_start[:-1]).long()
    max_q, max_kv = int(q_lens.max()), int(seq_lens.max())
    num_used = -(-max_kv // block_size)
    table = block_table[:, :num_used].long()
    keys = (
        k_cache[table].permute(0, 2, 1, 4, 3).reshape(num_reqs, -1, num_used * block_size, head_dim)
    )
    values = v_cache[table].transpose(1, 2).reshape(num_reqs, -1, num_used * block_size, head_dim)

    row_in_req = torch.arange(max_q, device=query.device)
    valid_row = row_in_req[None, :] < q_lens[:, None]  # [R, max_q]
    flat = (query_start[:-1, None].long() + row_in_req[None, :]).clamp(max=query.shape[2] - 1)
    padded = query[0].transpose(0, 1)[flat].transpose(1, 2)  # [R, heads, max_q, head_dim]
    position = (seq_lens.long() - q_lens)[:, None] + row_in_req[None, :]  # [R, max_q]
    kv_pos = torch.arange(num_used * block_size, device=query.device)
    visible = kv_pos[None, None, :] <= position[:, :, None]
    if window:
        visible &= kv_pos[None, None, :] > position[:, :, None] - window
    if softcap or sinks is not None:
        group = num_heads // keys.shape[1]
        scores = padded @ keys.repeat_interleave(group, 1).transpose(-1, -2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.float().masked_fill(~visible[:, None], float("-inf"))
        if sinks is not None:
            # One more score that takes part in the softmax and has no value of its own.
            sink = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., : values.shape[2]]
        attended = weights.to(values.dtype) @ values.repeat_interleave(group, 1)
    else:
        attended = nn.functional.scaled_dot_product_attention(
            padded, keys, values, attn_mask=visible[:, None], scale=scale, enable_gqa=True
        )
    out = query.new_zeros(1, query.shape[2], num_heads, head_dim)
    out[0, flat[valid_row]] = attended.transpose(1, 2)[valid_row]
    return out


def _paged_attention_meta(query: Tensor, *others: Any) -> Tensor:
    del others
    _, num_heads, num_rows, head_dim = query.shape
    return query.new_empty(1, num_rows, num_heads, head_dim)


_LIB.impl("paged_attention", _paged_attention, "CPU")
_LIB.impl("paged_attention", _paged_attention, "CUDA")
_LIB.impl("paged_attention", _paged_attention_meta, "Meta")


_discovered: list[KVGeometry] | None = None


@contextmanager
def discovery() -> Iterator[list[KVGeometry]]:
    """While open, attention calls are recorded and answered with zeros: no cache exists yet."""
    global _discovered
    found: list[KVGeometry] = []
    _discovered = found
    # Only now: with a mask function registered, modeling code would build masks in each step.
    masks = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    masks[ATTENTION_NAME] = _mask_of_window
    try:
        yield found
    finally:
        _discovered = None
        del masks[ATTENTION_NAME]


_OTHER_MASK = -1


def _mask_of_window(
    *_: Any, mask_function: Any, local_size: int | None = None, **__: Any
) -> Tensor:
    """In place of a mask, the window that it stands for: int64 [1, 1, 1, 1], 0 for none.

    What transformers' own attention computes follows the mask. The `sliding_window` that layers
    also pass says the same in most models, not in all.
    """
    window = local_size or 0
    return torch.full((1, 1, 1, 1), window if _is_window(mask_function, window) else _OTHER_MASK)


def _is_window(mask_function: Any, window: int) -> bool:
    """Whether the mask is causal with this window, as far as rows around its edges show."""
    for row in (0, 1, window, 2 * window + 3):
        for column in {0, row - window - 1, row - window, row - window + 1, row - 1, row, row + 1}:
            if column < 0:
                continue
            is_seen = bool(mask_function(*map(torch.tensor, (0, 0, row, column))))
            if is_seen != (column <= row and (not window or column > row - window)):
                return False
    return True


def _attention_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    query_start: Tensor | None = None,
    seq_lens: Tensor | None = None,
    block_table: Tensor | None = None,
    slots: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    if _discovered is not None:
        _check_arguments(query, key, value, slots, others)
        window = _window(attention_mask, sliding_window)
        _discovered.append(KVGeometry(module, key.shape[1], key.shape[3], window))
        return torch.zeros_like(query).transpose(1, 2), None
    cache: PagedCache = module.paged_cache  # type: ignore[assignment]
    out = torch.ops.paceline.paged_attention(
        query, key, value, cache.keys, cache.values, query_start, seq_lens, block_table, slots,
        query.shape[-1] ** -0.5 if scaling is None else scaling, softcap or 0.0,
        cache.window, cache.exact, s_aux,
    )  # fmt: skip
    return out, None


def _window(mask: Tensor | None, sliding_window: int | None) -> int:
    if mask is None:  # the model leaves the mask to its attention
        return sliding_window or 0
    if mask.dtype != torch.int64 or mask.numel() != 1 or int(mask) == _OTHER_MASK:
        raise UnsupportedAttention(
            "its mask is neither causal nor a sliding window, and is not computed here"
        )
    return int(mask)


# Arguments of the interface that change nothing here, whatever they are; besides `output_...`,
# which ask for results that nobody reads.
_IGNORED = frozenset({"dropout", "position_ids", "cache_position", "use_cache", "logits_to_keep"})


def _check_arguments(
    query: Tensor, key: Tensor, value: Tensor, slots: Tensor | None, others: dict[str, Any]
) -> None:
    """Refuse a layer that asks for more than is computed here: its output would be wrong.

    Raises:
        UnsupportedAttention: names what the layer asks for.
    """
    if slots is None:
        raise UnsupportedAttention("its attention does not receive what the model is called with")
    if key.shape[3] != value.shape[3] or key.shape[3] != query.shape[3]:
        raise UnsupportedAttention(
            f"keys of {key.shape[3]} and values of {value.shape[3]} dimensions (latent attention) "
            "have no paged cache"
        )
    for name, given in others.items():
        if name == "is_causal" and given is not False:
            continue
        if given is not None and name not in _IGNORED and not name.startswith("output_"):
            raise UnsupportedAttention(f"attention with {name!r} is not computed here")


def register() -> None:
    """Make `attn_implementation="paceline_paged"` known to transformers. Idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention_interface)
