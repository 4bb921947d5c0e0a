"""KV tensors over any list of attention layers, and attention of a step's rows through them.

A step's rows of all requests are flattened to one sequence `[1, T]`; what belongs together is in
`AttentionBatch`. Layers of transformers' modeling code get here through `interface`, layers of
our own models through `PagedAttention`. A draft's layers keep their KV in the target's block ids:
another `PagedKV`, with the same number of blocks and the same batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from actors.model.attention_op import native_kernels
from actors.model.attention_torch import (
    GatherPlan,
    HostBatch,
    paged_attention_torch,
    write_kv_torch,
)


@dataclass(frozen=True)
class AttentionBatch:
    """Where each row of a flattened batch sits. Tensors on the model's device.

    query_start int32 [R + 1], seq_lens int32 [R] (keys incl. this step's rows), block_table int32
    [R, max_blocks], slots int64 [T] (block id * block_size + offset, -1 for a padding row).
    `host`: the same four arrays on the host. `gather`: for layers that the torch path serves.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slots: Tensor
    host: HostBatch | None = None
    gather: GatherPlan | None = None

    @classmethod
    def from_host(cls, host: HostBatch, device: torch.device) -> AttentionBatch:
        return cls(
            torch.from_numpy(host.query_start).to(device),
            torch.from_numpy(host.seq_lens).to(device),
            torch.from_numpy(host.block_table).to(device),
            torch.from_numpy(host.slots).to(device),
            host,
        )


@dataclass(frozen=True)
class KVGeometry:
    """What one attention layer caches for a token: `num_kv_heads` keys and values of `head_dim`.

    A position sees the last `window` positions, itself included; 0: all of them. `module` gets its
    tensors as `paged_cache`.
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


class PagedKV:
    """The caches of a model's attention layers, by block id. `allocate` comes before any forward.

    Args:
        layers: What each attention layer caches; modules of any kind.
        exact: As in `PagedCache`.
    """

    def __init__(
        self,
        layers: Sequence[KVGeometry],
        dtype: torch.dtype,
        device: torch.device,
        *,
        exact: bool = True,
    ) -> None:
        self._layers = tuple(layers)
        self._dtype = dtype
        self._device = device
        self._exact = exact
        self.caches: list[PagedCache] = []
        self.num_blocks = 0
        self._has_kernels = False

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(number of layers, KV heads, head_dim) for each shape of what this rank caches."""
        counts = Counter((g.num_kv_heads, g.head_dim) for g in self._layers)
        return tuple((n, heads, dim) for (heads, dim), n in sorted(counts.items()))

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Create the KV tensors, block 0 (padding) included, and give each layer its own."""
        self.caches = []
        self.num_blocks = num_blocks
        for layer in self._layers:
            cache = PagedCache(
                num_blocks,
                layer.num_kv_heads,
                layer.head_dim,
                block_size,
                self._dtype,
                self._device,
                exact=self._exact,
                window=layer.window,
            )
            layer.module.paged_cache = cache
            self.caches.append(cache)
        self._has_kernels = all(native_kernels(cache.keys) is not None for cache in self.caches)

    @property
    def is_exact(self) -> bool:
        """Whether the C kernel serves every layer: a row's bits do not depend on the batch."""
        return self._exact and self._has_kernels

    def prepare(self, batch: AttentionBatch) -> AttentionBatch:
        """`batch` with what these layers' path needs to be computed once, and not by each."""
        if self._has_kernels or not self.caches or batch.host is None or batch.gather is not None:
            return batch
        block_size = self.caches[0].keys.shape[3]
        return replace(batch, gather=GatherPlan(batch.host, block_size, self._device))


def attend(
    cache: PagedCache,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    batch: AttentionBatch,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    causal: bool = True,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write `key` and `value` [1, kv_heads, T, head_dim] (None: nothing), then attend.

    Row j of a request sees the positions up to its own, or with `causal` False all that the
    request has, this step's included; of these, where the layer has a window, those behind
    position - window. `scale`: of the scores; None: head_dim ** -0.5. `sinks`: [heads].

    Returns:
        [1, T, heads, head_dim] for `query` [1, heads, T, head_dim].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if batch.gather is not None and native_kernels(cache.keys) is None:
        return paged_attention_torch(
            query, key, value, cache.keys, cache.values, batch.gather, scale, softcap,
            cache.window, causal, sinks,
        )  # fmt: skip
    out: Tensor = torch.ops.paceline.paged_attention(
        query, key, value, cache.keys, cache.values, batch.query_start, batch.seq_lens,
        batch.block_table, batch.slots, scale, softcap, cache.window, causal, cache.exact, sinks,
    )  # fmt: skip
    return out


class PagedAttention(nn.Module):
    """Attention of a layer of our own (a draft's) over its paged cache.

    Model code calls it with projected and rotated heads. `geometry` is what `PagedKV` needs; a
    layer that reads another one's cache sets `paged_cache` to that instead, and passes no keys.

    Args:
        window: Positions seen, the own one included; 0: all.
        causal: False: the rows of a request see each other whatever their order.
    """

    paged_cache: PagedCache

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        window: int = 0,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.geometry = KVGeometry(self, num_kv_heads, head_dim, window)
        self.scale = scale
        self.causal = causal

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, batch: AttentionBatch
    ) -> Tensor:
        """[1, T, heads, head_dim]; arguments as of `attend`."""
        return attend(
            self.paged_cache, query, key, value, batch, scale=self.scale, causal=self.causal
        )

    def write(self, key: Tensor, value: Tensor, batch: AttentionBatch) -> None:
        """Put the rows' keys and values [1, kv_heads, T, head_dim] into their slots."""
        cache = self.paged_cache
        if batch.gather is not None and native_kernels(cache.keys) is None:
            write_kv_torch(key, value, cache.keys, cache.values, batch.gather.write)
            return
        torch.ops.paceline.write_kv(key, value, cache.keys, cache.values, batch.slots)
