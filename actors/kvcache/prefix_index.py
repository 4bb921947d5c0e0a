"""Finding KV blocks by the tokens they hold.

A block's hash covers its tokens and, through its parent's hash, everything before them, so equal
hashes mean equal whole prefixes. Only full blocks of confirmed tokens are ever published.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

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
    hashes: list[BlockHash], token_ids: Int32Array, block_size: int, salt: str | None = None
) -> None:
    """Append to `hashes` those of the full blocks of `token_ids` that are not in it yet."""
    parent = hashes[-1] if hashes else root_hash(salt)
    for i in range(len(hashes), len(token_ids) // block_size):
        parent = chain_hash(parent, token_ids[i * block_size : (i + 1) * block_size])
        hashes.append(parent)


class PrefixIndex:
    """Map from block hash to block id, one block per hash."""

    def __init__(self) -> None:
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Block ids of the longest published prefix of `hashes`."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, block_hash: BlockHash, block_id: int) -> bool:
        """Make `block_id` findable. False when another block with that content already is."""
        if block_hash in self._block_of:
            return self._block_of[block_hash] == block_id
        assert block_id not in self._hash_of, f"block {block_id} is published with other content"
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        return True

    def forget(self, block_id: int) -> None:
        """The block gets other content."""
        del self._block_of[self._hash_of.pop(block_id)]

    def clear(self) -> None:
        self._block_of.clear()
        self._hash_of.clear()

    def published_hash(self, block_id: int) -> BlockHash | None:
        return self._hash_of.get(block_id)
