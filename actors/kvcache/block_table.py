"""Block tables: which KV blocks hold a request's positions.

Who owns which positions of a table (bs = block size):

    0 ........ prefix hit .... num_computed ...... num_computed + new + lookahead
    |  shared, read only  |  own, KV valid   |  own, reserved for this step  |

Read only for the target. A drafter that has less of a prefix hit than the target writes its own
part of the shared blocks later; whoever shares them would write the same.

`commit` shrinks the table to the blocks that hold valid KV. That is the whole rollback: nothing
is moved or cleared, and blocks that held only rejected drafts go back to the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.kvcache.block_pool import BlockPool
from actors.kvcache.prefix_index import BlockHash, PrefixIndex
from actors.steps.messages import BlockDelta, token_array


@dataclass(slots=True, eq=False)
class BlockTable:
    """One request's blocks, in position order. Changed only through `BlockTables`."""

    block_ids: list[int] = field(default_factory=list)
    # Leading blocks that the workers know by these ids.
    num_sent: int = 0
    # Leading blocks already offered to the prefix index.
    num_published: int = 0
    # Leading blocks that are published and known to have the drafter's KV.
    num_whole: int = 0


class BlockTables:
    """All block tables of a replica; the only writer of block ids.

    Args:
        num_blocks: Blocks in the KV tensors, block 0 (padding) included.
        block_size: Positions per block.
        max_model_len: No reservation goes past this position.
        enable_prefix_caching: Keep published blocks findable after their owner is gone.
        is_linked: See `PrefixIndex`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_prefix_caching: bool,
        *,
        is_linked: bool = False,
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.index = PrefixIndex(is_linked=is_linked) if enable_prefix_caching else None
        self.pool = BlockPool(num_blocks, self.index.forget if self.index is not None else None)
        self._tables: set[BlockTable] = set()

    def __len__(self) -> int:
        return len(self._tables)

    def num_blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def open(self) -> BlockTable:
        """A new, empty table. Give it back with `free`."""
        table = BlockTable()
        self._tables.add(table)
        return table

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Blocks that hold the longest published prefix; not retained yet."""
        return self.index.match(hashes) if self.index is not None else []

    def attach(self, table: BlockTable, block_ids: list[int]) -> None:
        """Start an empty table with blocks found by `match`."""
        assert not table.block_ids, "a prefix can only start a table"
        self.pool.retain(block_ids)
        table.block_ids = list(block_ids)
        table.num_published = len(block_ids)
        table.num_whole = self.num_whole(block_ids)

    def reserve(
        self, table: BlockTable, num_computed: int, num_new: int, num_lookahead: int
    ) -> bool:
        """Make room for `num_new` positions after `num_computed`, drafts included, and for what
        the drafter writes after them. False, and nothing changed, when blocks are short."""
        slots = min(num_computed + num_new + num_lookahead, self.max_model_len)
        assert num_computed + num_new <= self.max_model_len, (
            f"positions up to {num_computed + num_new} asked, context ends at {self.max_model_len}"
        )
        missing = -(-slots // self.block_size) - len(table.block_ids)
        if missing > 0:
            if missing > self.pool.num_available:
                return False
            table.block_ids += self.pool.allocate(missing)
        return True

    def commit(self, table: BlockTable, num_computed: int) -> None:
        """KV is valid for exactly `num_computed` positions; blocks past them are freed."""
        keep = -(-num_computed // self.block_size)
        if keep < len(table.block_ids):
            dropped = table.block_ids[keep:]
            del table.block_ids[keep:]
            table.num_sent = min(table.num_sent, keep)
            dropped.reverse()
            self.pool.release(dropped)

    def publish(self, table: BlockTable, hashes: Sequence[BlockHash], num_positions: int) -> None:
        """Make full blocks below `num_positions` findable. Their tokens must be confirmed and the
        target's KV written; so must the drafter's, where it could not be made later."""
        num_full = num_positions // self.block_size
        if self.index is None or num_full <= table.num_published:
            return
        for i in range(table.num_published, num_full):
            before = table.block_ids[i - 1] if i else None
            if self.index.publish(hashes[i], table.block_ids[i], before):
                self.pool.set_findable(table.block_ids[i])
        table.num_published = num_full

    def mark_whole(self, table: BlockTable, num_positions: int) -> None:
        """The drafter's KV is final below `num_positions`: a hit may rely on it."""
        num_full = min(num_positions // self.block_size, table.num_published)
        if self.index is None or num_full <= table.num_whole:
            return
        for block in table.block_ids[table.num_whole : num_full]:
            self.index.mark_whole(block)
        table.num_whole = num_full

    def num_whole(self, block_ids: Sequence[int]) -> int:
        """Leading blocks of a prefix hit that have the drafter's KV too."""
        return self.index.num_whole(block_ids) if self.index is not None else 0

    def take_delta(self, table: BlockTable, slot: int) -> BlockDelta | None:
        """What the workers do not know yet of this table, once."""
        first = table.num_sent
        if first == len(table.block_ids):
            return None
        table.num_sent = len(table.block_ids)
        return BlockDelta(slot, first, token_array(table.block_ids[first:]))

    def free(self, table: BlockTable) -> None:
        """Give all blocks back; published ones stay findable until evicted."""
        self._tables.remove(table)
        # Tail first: a prefix is worth more than what follows it.
        self.pool.release(reversed(table.block_ids))
        table.block_ids = []

    def forget_prefixes(self) -> None:
        """Nothing cached can be found any more (its KV is void or incomplete)."""
        if self.index is None:
            return
        self.index.clear()
        self.pool.forget_content()
        for table in self._tables:
            table.num_published = table.num_whole = 0

    def check_integrity(self) -> None:
        """Assert pool states and that reference counts are those of the open tables."""
        self.pool.check_integrity()
        owners: dict[int, int] = {}
        for table in self._tables:
            assert table.num_sent <= len(table.block_ids), "workers know more blocks than exist"
            for block in table.block_ids:
                owners[block] = owners.get(block, 0) + 1
        assert len(owners) == self.pool.num_referenced, (
            f"{self.pool.num_referenced} blocks are referenced, tables hold {len(owners)}"
        )
        for block, count in owners.items():
            assert self.pool.ref_count(block) == count, (
                f"block {block}: {count} owners, reference count {self.pool.ref_count(block)}"
            )
