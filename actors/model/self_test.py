"""Whether rows are what they promise to be: the same bits whatever shares their forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actors.model.inputs import EntryRows, SlotTables
from actors.steps.messages import BlockDelta, token_array

# More than a step runs as it is, so that a filled-up chunk is among what is compared.
_CHECKED_ROWS = 40


def rows_are_apart(
    logits_of: Callable[[EntryRows], Tensor],
    tables: SlotTables,
    *,
    num_blocks: int,
    max_positions: int,
    vocab_size: int,
) -> bool:
    """Whether a prompt's logits have the same bits as one chunk, in parts, and one by one.

    Overwrites the first blocks behind the padding block, and slot 0 of `tables`.
    """
    block_size = tables.block_size
    num_rows = min(_CHECKED_ROWS, (num_blocks - 1) * block_size, max_positions - 1)
    tables.apply([], [BlockDelta(0, 0, token_array(range(1, 1 + -(-num_rows // block_size))))])
    ids = token_array([7 * i % vocab_size for i in range(num_rows)])

    def logits(sizes: Sequence[int]) -> Tensor:
        parts, start = [], 0
        for size in sizes:
            parts.append(logits_of(EntryRows(0, start, ids[start : start + size], size)))
            start += size
        return torch.cat(parts)

    whole = logits([num_rows])
    cuts = [c for c in ([1, 1, 1], [5, 1, 2], [17, 1, 3]) if sum(c) <= num_rows]
    # All of them, whatever the first shows: other ranks take part in each forward.
    parts = [logits(sizes) for sizes in cuts]
    return all(torch.equal(part, whole[: len(part)]) for part in parts)
