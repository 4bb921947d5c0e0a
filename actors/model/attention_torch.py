"""Paged attention with torch ops: gather each request's blocks, one padded SDPA for all.

Slower than the C kernel and, because matrix products depend on the number of rows, equal to it
only up to rounding. Its oracle, and the path for other devices and dtypes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn


def _on_device(array: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


class HostBatch(NamedTuple):
    """The arrays of an `AttentionBatch`, on the host."""

    query_start: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]


class WritePlan:
    """Which rows of a batch have a slot, and in which block and place."""

    def __init__(self, slots: npt.NDArray[np.int64], block_size: int, device: torch.device) -> None:
        rows = np.nonzero(slots >= 0)[0]
        self.rows = _on_device(rows, device)
        self.blocks = _on_device(slots[rows] // block_size, device)
        self.offsets = _on_device(slots[rows] % block_size, device)


class GatherPlan:
    """Where a batch's rows and keys lie, as the index tensors that the torch path gathers with.

    Made once a batch, from what the host knows: a layer that asked the device for a length would
    wait until everything before it has run.

    Args:
        block_size: Positions of a block.
        device: Of the model.
    """

    def __init__(self, host: HostBatch, block_size: int, device: torch.device) -> None:
        query_start, seq_lens, block_table, slots = host
        starts = query_start[:-1, None].astype(np.int64)
        q_lens = np.diff(query_start).astype(np.int64)
        rows = np.arange(q_lens.max())[None]  # [1, max_q]
        num_used = -(-int(seq_lens.max()) // block_size)
        self.num_rows = int(query_start[-1])
        self.write = WritePlan(slots, block_size, device)
        self.table = _on_device(block_table[:, :num_used].astype(np.int64), device)
        # [R, max_q] rows of the flat batch, and where its rows lie in that.
        self.padded = _on_device(np.minimum(starts + rows, len(slots) - 1), device)
        self.unpadded = _on_device(np.nonzero((rows < q_lens[:, None]).ravel())[0], device)
        self._positions = _on_device((seq_lens - q_lens)[:, None] + rows, device)
        self._ends = _on_device(seq_lens.astype(np.int64)[:, None] - 1, device)
        self._keys = torch.arange(num_used * block_size, device=device)
        self._visible: dict[tuple[int, bool], Tensor] = {}

    def visible(self, window: int, causal: bool) -> Tensor:
        """bool [R, max_q, keys]: what each padded row sees, once for each kind of layer."""
        found = self._visible.get((window, causal))
        if found is None:
            last = self._positions if causal else self._ends
            found = self._keys <= last[:, :, None]
            if window:
                found = found & (self._keys > self._positions[:, :, None] - window)
            self._visible[window, causal] = found
        return found


def write_kv_torch(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, plan: WritePlan
) -> None:
    """Put the rows of [1, kv_heads, T, head_dim] that have a slot into the caches."""
    k_cache[plan.blocks, :, :, plan.offsets] = key[0].transpose(0, 1)[plan.rows]
    v_cache[plan.blocks, :, plan.offsets] = value[0].transpose(0, 1)[plan.rows]


def paged_attention_torch(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: GatherPlan,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    causal: bool = True,
    sinks: Tensor | None = None,
) -> Tensor:
    """[1, T, heads, head_dim], as the op `paged_attention`; rows of padding are 0."""
    if key is not None and value is not None:
        write_kv_torch(key, value, k_cache, v_cache, plan.write)
    _, num_heads, num_rows, head_dim = query.shape
    num_reqs, num_kv_heads = len(plan.table), k_cache.shape[1]
    keys = k_cache[plan.table].permute(0, 2, 1, 4, 3).reshape(num_reqs, num_kv_heads, -1, head_dim)
    values = v_cache[plan.table].transpose(1, 2).reshape(num_reqs, num_kv_heads, -1, head_dim)
    padded = query[0].transpose(0, 1)[plan.padded].transpose(1, 2)  # [R, heads, max_q, head_dim]
    visible = plan.visible(window, causal)[:, None]
    if softcap or sinks is not None:
        group = num_heads // num_kv_heads
        scores = padded @ keys.repeat_interleave(group, 1).transpose(-1, -2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.float().masked_fill(~visible, float("-inf"))
        if sinks is not None:
            # One more score that takes part in the softmax and has no value of its own.
            sink = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., : values.shape[2]]
        attended = weights.to(values.dtype) @ values.repeat_interleave(group, 1)
    else:
        attended = nn.functional.scaled_dot_product_attention(
            padded, keys, values, attn_mask=visible, scale=scale, enable_gqa=True
        )
    out = query.new_zeros(1, num_rows, num_heads, head_dim)
    out[0, : plan.num_rows] = attended.transpose(1, 2).flatten(0, 1)[plan.unpadded]
    return out
