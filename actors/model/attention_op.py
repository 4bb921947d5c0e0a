"""The ops of paged attention: `paceline::paged_attention` and `paceline::write_kv`.

`paged_attention` writes the new rows' keys and values into their slots, then attends, so that rows
of one request see each other through the cache. `write_kv` only writes: context that a draft layer
keeps without asking anything of it.

They are ops so that a compiled layer holds them as one opaque call. On CPU in float32 the C kernel
computes (a row's bits depend on its own position only); where it cannot, the torch path does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actors.model.attention_torch import (
    GatherPlan,
    HostBatch,
    WritePlan,
    paged_attention_torch,
    write_kv_torch,
)
from actors.native.build import AttentionKernels, load_kernels

# From this many rows on, SDPA's matrix products beat the kernel's row at a time.
GEMM_ROWS = 128

_LIB = torch.library.Library("paceline", "DEF")
# Without `key` and `value` nothing is written: a layer that reads another one's cache.
_LIB.define(
    "paged_attention(Tensor query, Tensor? key, Tensor? value, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor query_start, Tensor seq_lens, Tensor block_table, Tensor slots, "
    "float scale, float softcap, int window, bool causal, bool exact, Tensor? sinks=None) -> Tensor"
)
_LIB.define(
    "write_kv(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()"
)


def native_kernels(k_cache: Tensor) -> AttentionKernels | None:
    """The C kernels for this cache, or None when the torch path must serve it."""
    if k_cache.device.type != "cpu" or k_cache.dtype != torch.float32:
        return None
    return load_kernels(k_cache.shape[2], k_cache.shape[3])


def _paged_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slots: Tensor,
    scale: float,
    softcap: float,
    window: int,
    causal: bool,
    exact: bool,
    sinks: Tensor | None = None,
) -> Tensor:
    kernels = native_kernels(k_cache)
    if kernels is None or (not exact and query.shape[2] >= GEMM_ROWS):
        # Tensors of the host: looking at their values waits for nothing.
        host = HostBatch(query_start.numpy(), seq_lens.numpy(), block_table.numpy(), slots.numpy())
        plan = GatherPlan(host, k_cache.shape[3], k_cache.device)
        return paged_attention_torch(
            query, key, value, k_cache, v_cache, plan, scale, softcap, window, causal, sinks
        )
    if key is not None and value is not None:
        _write(kernels, key, value, k_cache, v_cache, slots)
    _, num_heads, num_rows, head_dim = query.shape
    query = _dense_heads(query)
    out = query.new_empty(1, num_rows, num_heads, head_dim)
    status = kernels.paged_attention(
        query.data_ptr(), out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
        block_table.data_ptr(), query_start.data_ptr(), seq_lens.data_ptr(), seq_lens.shape[0],
        block_table.shape[1], num_heads, k_cache.shape[1], query.stride(2), query.stride(1),
        None if sinks is None else sinks.contiguous().data_ptr(),
        scale, softcap, window, causal, torch.get_num_threads(),
    )  # fmt: skip
    if status != 0:
        raise MemoryError("paged attention: no scratch memory")
    return out


def _write_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    kernels = native_kernels(k_cache)
    if kernels is not None:
        _write(kernels, key, value, k_cache, v_cache, slots)
    else:
        plan = WritePlan(slots.numpy(), k_cache.shape[3], k_cache.device)
        write_kv_torch(key, value, k_cache, v_cache, plan)


def _write(
    kernels: AttentionKernels,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> None:
    key, value = _dense_heads(key), _dense_heads(value)
    kernels.write_kv(
        key.data_ptr(), value.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), slots.data_ptr(),
        key.shape[2], key.shape[1], key.stride(2), key.stride(1), value.stride(2), value.stride(1),
    )  # fmt: skip


def _dense_heads(x: Tensor) -> Tensor:
    """The kernel reads rows and heads through strides, but a head's numbers side by side."""
    return x if x.stride(3) == 1 else x.contiguous()


def _paged_attention_meta(query: Tensor, *others: Any) -> Tensor:
    del others
    _, num_heads, num_rows, head_dim = query.shape
    return query.new_empty(1, num_rows, num_heads, head_dim)


def _write_kv_meta(*others: Any) -> None:
    del others


_LIB.impl("paged_attention", _paged_attention, "CPU")
_LIB.impl("paged_attention", _paged_attention_meta, "Meta")
_LIB.impl("write_kv", _write_kv, "CPU")
_LIB.impl("write_kv", _write_kv_meta, "Meta")
