"""Finding KV blocks by the tokens they hold.

A block's hash covers its tokens and, through its parent's hash, everything before them, so equal
hashes mean equal whole prefixes. Only full blocks of confirmed tokens are ever published.

A published block has the target's KV. Where a drafter keeps KV in the same blocks, those that have
its part too are marked *whole*.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

from actors.steps.messages import Int32Array

BlockHash = bytes
_DIGEST_BYTES = 16


def root_hash(salt: str | None = None) -> BlockHash:
    """Parent of a sequence's first block. Sequences with different salts never share blocks."""
    return blake2b((salt or "").encode(), digest_size=_DIGEST_BYTES, person=b"paceline").digest()


def chain_hash(parent: BlockHash, token_ids: Int32Array) -> BlockHash:
    """Hash of the block that holds `token_ids` after the prefix that `parent` stands for."""
    return blake2b(parent + token_ids.tobytes(), digest_size=_DIGEST_BYTES).digest()


def extend_hashes(
    hashes: list[BlockHash],
    token_ids: Int32Array,
    block_size: int,
    lookahead: int = 0,
    salt: str | None = None,
) -> None:
    """Append to `hashes` those of the full blocks of `token_ids` that are not in it yet.

    With `lookahead` a block's hash also covers that many tokens after the block, and is made once
    they are known: for drafters whose KV in the block depends on them.
    """
    parent = hashes[-1] if hashes else root_hash(salt)
    for i in range(len(hashes), max(len(token_ids) - lookahead, 0) // block_size):
        parent = chain_hash(parent, token_ids[i * block_size : (i + 1) * block_size + lookahead])
        hashes.append(parent)


class PrefixIndex:
    """Map from block hash to block id, one block per hash.

    Args:
        is_linked: A block counts only after the very block that it was written behind. Needed
            where what a block holds depends on tokens after it that its hash does not cover: equal
            tokens are then no proof that two blocks are alike, but that one was written behind the
            other is.
    """

    def __init__(self, *, is_linked: bool = False) -> None:
        self._is_linked = is_linked
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        # Each publication has a number; a linked block knows that of the block before it.
        self._num_published = 0
        self._number_of: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._whole: set[int] = set()

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Block ids of the longest published prefix of `hashes`."""
        blocks: list[int] = []
        number = 0
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None or (self._is_linked and self._before[block] != number):
                break
            blocks.append(block)
            number = self._number_of[block]
        return blocks

    def publish(self, block_hash: BlockHash, block_id: int, before: int | None) -> bool:
        """Make `block_id`, written behind block `before`, findable. False when another block with
        that content already is, or when, linked, the one before it is not."""
        if block_hash in self._block_of:
            return self._block_of[block_hash] == block_id
        if self._is_linked and before is not None and before not in self._number_of:
            return False
        assert block_id not in self._hash_of, f"block {block_id} is published with other content"
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        self._num_published += 1
        self._before[block_id] = 0 if before is None else self._number_of.get(before, 0)
        self._number_of[block_id] = self._num_published
        return True

    def mark_whole(self, block_id: int) -> None:
        """The drafter's KV of this block, if it is published, is written too."""
        if block_id in self._hash_of:
            self._whole.add(block_id)

    def num_whole(self, block_ids: Sequence[int]) -> int:
        """Leading blocks that are whole."""
        return sum(1 for _ in takewhile(self._whole.__contains__, block_ids))

    def forget(self, block_id: int) -> None:
        """The block gets other content."""
        self._whole.discard(block_id)
        del self._block_of[self._hash_of.pop(block_id)]
        del self._number_of[block_id], self._before[block_id]

    def clear(self) -> None:
        for table in (self._block_of, self._hash_of, self._number_of, self._before):
            table.clear()
        self._whole.clear()
