"""Packed weights in huge pages, one behind the other.

A step reads all weights once. In pages of 4 KiB it also reads 250 entries of page tables for each
megabyte, and what fetches memory ahead stops at each page's end.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor, nn

_CHUNK_BYTES = 64 << 20  # so that not all weights are there twice meanwhile
_LINE_BYTES = 64


def move_panels(model: nn.Module) -> None:
    """Move all panels below `model` there; where the system has no such pages they stay."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    holders: dict[int, list[nn.Module]] = {}  # one weight may be a table, a head and several slices
    for module in model.modules():
        panels = getattr(module, "panels", None)
        if isinstance(panels, Tensor) and panels.layout == torch.strided:
            holders.setdefault(panels.data_ptr(), []).append(module)
    chunk, used = torch.empty(0, dtype=torch.uint8), 0
    for modules in holders.values():
        panels = modules[0].panels
        assert isinstance(panels, Tensor)
        num_bytes = panels.numel() * panels.element_size()
        if used + num_bytes > chunk.numel():
            chunk, used = _pages(max(_CHUNK_BYTES, num_bytes)), 0
        moved = chunk[used : used + num_bytes].view(panels.dtype)
        moved.copy_(panels)
        used += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        for module in modules:
            module.panels = moved


def _pages(num_bytes: int) -> Tensor:
    """Memory, uint8, that the system is asked to back by huge pages; freed with the tensor."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
