"""Position embeddings from a table.

Modeling code evaluates cos and sin for the positions of each call. Vectorised kernels treat the
last few elements of a buffer differently from the rest, so the bits of a position's row could
depend on how many rows share the call. A table computed once removes that, and the work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RotaryTable(nn.Module):
    """Stands in for a model's rotary module: same call, values looked up by position.

    The table covers positions 0..max_positions-1 and is computed by the wrapped module in one
    call, so types whose frequencies depend on the sequence length (dynamic NTK, LongRoPE) use
    those of `max_positions` throughout: one fixed choice per server, not one per request.
    """

    def __init__(self, rotary: nn.Module, max_positions: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.max_positions = max_positions
        self._tables: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def forward(
        self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        # Models with two kinds of layers pass the layer type: one table each.
        key = (x.dtype, x.device, *args, *sorted(kwargs.items()))
        table = self._tables.get(key)
        if table is None:
            # The table outlives this call: as an inference tensor it would be of no use to a
            # forward outside of inference mode.
            with torch.inference_mode(False), torch.no_grad():
                positions = torch.arange(self.max_positions, device=x.device)[None]
                cos, sin = self.rotary(x.new_zeros(x[:, :1].shape), positions, *args, **kwargs)
                table = (cos[0].contiguous(), sin[0].contiguous())
            self._tables[key] = table
        return table[0][position_ids], table[1][position_ids]
