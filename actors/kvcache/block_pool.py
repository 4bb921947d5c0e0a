"""Which KV blocks are free, cached or in use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

# Workers pad block tables and slot mappings with block 0; it never belongs to a request.
NULL_BLOCK = 0


class BlockPool:
    """Reference-counted KV block ids with least-recently-used eviction.

    A block is in exactly one state: *free* (no owner, content void), *cached* (no owner, content
    still findable by its prefix hash) or *referenced* (one or more owners). Allocation takes free
    blocks first and then evicts the cached block unused for longest.

    Args:
        num_blocks: Blocks in the KV tensors, the reserved block 0 included.
        on_evict: Called with a cached block's id before it is handed out for other content.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: needs at least 2, block 0 is reserved")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._is_findable = bytearray(num_blocks)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that an allocation could get: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_usable - self.num_available

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached

    def allocate(self, num: int) -> list[int]:
        """`num` blocks with one reference each. The caller has checked `num_available`."""
        assert num <= self.num_available, f"{num} blocks asked, {self.num_available} available"
        blocks = []
        for _ in range(num):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._is_findable[block] = 0
                if self._on_evict is not None:
                    self._on_evict(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def retain(self, block_ids: Iterable[int]) -> None:
        """One more owner for blocks found through the prefix index."""
        for block in block_ids:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One owner less. Blocks given first are evicted first: pass a table's tail first."""
        for block in block_ids:
            count = self._ref_counts[block] - 1
            assert count >= 0 and block != NULL_BLOCK, f"block {block} released without an owner"
            self._ref_counts[block] = count
            if count == 0:
                if self._is_findable[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def set_findable(self, block_id: int) -> None:
        """The prefix index can now find this referenced block: keep its content after release."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} has no owner"
        self._is_findable[block_id] = 1

    def forget_content(self) -> None:
        """No block is findable any more; cached blocks become free."""
        self._is_findable = bytearray(self.num_blocks)
        self._free.extend(self._cached)
        self._cached.clear()

    def check_integrity(self) -> None:
        """Assert that every usable block is in exactly one state."""
        free, cached = set(self._free), set(self._cached)
        referenced = {b for b, count in enumerate(self._ref_counts) if count > 0}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not (free & cached or free & referenced or cached & referenced), "states overlap"
        total = len(free) + len(cached) + len(referenced)
        assert total == self.num_usable, (
            f"free {len(free)} + cached {len(cached)} + referenced {len(referenced)} = {total}, "
            f"but the pool has {self.num_usable}"
        )
        assert all(self._is_findable[b] for b in cached), "a cached block is not findable"
        assert NULL_BLOCK not in free | cached | referenced, "block 0 is reserved"
