import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.kvcache.block_pool import BlockPool
from actors.kvcache.block_table import BlockTables
from actors.kvcache.prefix_index import chain_hash, extend_hashes, root_hash
from actors.steps.messages import token_array


def test_block_0_is_never_handed_out_and_eviction_is_oldest_first():
    evicted = []
    pool = BlockPool(5, evicted.append)
    blocks = pool.allocate(4)
    assert sorted(blocks) == [1, 2, 3, 4]
    for block in blocks:
        pool.set_findable(block)
    pool.release([blocks[2]])
    pool.release([blocks[0], blocks[1]])
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (0, 3, 1)
    pool.retain([blocks[0]])
    assert pool.allocate(1) == [blocks[2]] and evicted == [blocks[2]]
    assert pool.allocate(1) == [blocks[1]]
    pool.check_integrity()
    with pytest.raises(AssertionError):
        pool.allocate(1)


def test_a_double_release_is_caught():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="without an owner"):
        pool.release(blocks)


def test_a_block_is_whole_until_it_gets_other_content():
    tables = BlockTables(4, 2, 6, True)
    tokens = token_array(range(6))
    hashes = []
    extend_hashes(hashes, tokens, 2)
    table = tables.open()
    assert tables.reserve(table, 0, 6, 0)
    tables.mark_whole(table, 6)  # not published: nobody can find them
    assert tables.num_whole(table.block_ids) == 0
    tables.publish(table, hashes, 6)
    tables.mark_whole(table, 5)
    assert tables.num_whole(table.block_ids) == 2
    blocks = list(table.block_ids)
    tables.free(table)
    again = tables.open()
    tables.attach(again, tables.match(hashes))
    assert again.block_ids == blocks and again.num_whole == 2
    tables.mark_whole(again, 6)
    assert tables.num_whole(blocks) == 3
    tables.free(again)
    other = tables.open()
    assert tables.reserve(other, 0, 2, 0)  # evicts the tail, used longest ago
    assert tables.num_whole(blocks) == 2 and tables.num_whole(other.block_ids) == 0
    tables.forget_prefixes()
    assert tables.num_whole(blocks) == 0
    tables.free(other)


@pytest.mark.parametrize("fault", ["lost", "twice", "count"])
def test_integrity_check_sees_a_broken_pool(fault):
    tables = BlockTables(6, 4, 16, True)
    table = tables.open()
    assert tables.reserve(table, 0, 8, 0)
    tables.check_integrity()
    if fault == "lost":
        table.block_ids.pop()
    elif fault == "twice":
        tables.pool._free.append(table.block_ids[0])
    else:
        tables.pool.retain([table.block_ids[0]])
    with pytest.raises(AssertionError):
        tables.check_integrity()


def test_hashes_depend_on_all_tokens_before_and_on_the_salt():
    a, b = root_hash(), root_hash("tenant")
    tokens = token_array([1, 2, 3, 4])
    assert a != b and chain_hash(a, tokens) != chain_hash(b, tokens)
    one, two = [], []
    extend_hashes(one, token_array([1, 2, 3, 4, 5, 6, 7, 8, 9]), 4)
    extend_hashes(two, token_array([0, 2, 3, 4, 5, 6, 7, 8, 9]), 4)
    assert len(one) == 2 and one[0] != two[0] and one[1] != two[1]
    grown = one[:1]
    extend_hashes(grown, token_array([1, 2, 3, 4, 5, 6, 7, 8, 9]), 4)
    assert grown == one


@pytest.mark.parametrize(
    ("computed", "new", "lookahead", "expected"),
    [(30, 4, 3, 3), (30, 4, 4, 3), (42, 4, 3, 4), (42, 4, 4, 4), (41, 4, 3, 3), (41, 4, 4, 4)],
)
def test_golden_lookahead_blocks(computed, new, lookahead, expected):
    tables = BlockTables(20, 16, 256, False)
    table = tables.open()
    assert tables.reserve(table, computed, new, lookahead)
    assert len(table.block_ids) == expected


def test_reservations_end_at_the_context_and_fail_without_a_change():
    tables = BlockTables(5, 4, 16, False)
    table = tables.open()
    assert tables.reserve(table, 12, 4, 9)
    assert len(table.block_ids) == 4
    other = tables.open()
    assert not tables.reserve(other, 0, 1, 0)
    assert other.block_ids == []
    with pytest.raises(AssertionError, match="context ends"):
        tables.reserve(table, 14, 3, 0)


def test_rollback_frees_exactly_the_blocks_past_the_end():
    tables = BlockTables(20, 4, 64, False)
    table = tables.open()
    assert tables.reserve(table, 0, 14, 3)
    held = list(table.block_ids)
    first = tables.take_delta(table, 3)
    assert first is not None and first.first == 0 and first.block_ids.tolist() == held
    assert tables.take_delta(table, 3) is None
    tables.commit(table, 9)
    assert table.block_ids == held[:3]
    assert tables.pool.num_free == 19 - 3
    assert tables.reserve(table, 9, 5, 0)
    delta = tables.take_delta(table, 3)
    assert delta is not None and (delta.first, len(delta.block_ids)) == (3, 1)
    tables.check_integrity()


class TablesMachine(RuleBasedStateMachine):
    """Random reservations, commits, publications, hits and frees against a plain model."""

    def __init__(self):
        super().__init__()
        self.tables = BlockTables(14, 2, 16, True)
        self.live = {}  # table -> [tokens, num_computed, worker's view]
        self.random = random.Random(0)

    def _sync(self, table):
        delta = self.tables.take_delta(table, 0)
        view = self.live[table][2]
        if delta is not None:
            assert delta.first <= len(view)
            del view[delta.first :]
            view.extend(delta.block_ids.tolist())
        assert view[: len(table.block_ids)] == table.block_ids

    @rule(first=st.integers(0, 1), num=st.integers(1, 16))
    def start(self, first, num):
        tokens = token_array([first] * num)
        hashes = []
        extend_hashes(hashes, tokens, 2)
        hit = self.tables.match(hashes[: (num - 1) // 2])
        table = self.tables.open()
        self.tables.attach(table, hit)
        self.live[table] = [tokens, 2 * len(hit), []]

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99), new=st.integers(1, 6), kept=st.integers(0, 6))
    def step(self, pick, new, kept):
        table = list(self.live)[pick % len(self.live)]
        tokens, computed, _ = self.live[table]
        new = min(new, 16 - computed)
        before = list(table.block_ids)
        if not self.tables.reserve(table, computed, new, 2):
            assert table.block_ids == before
            return
        self._sync(table)
        computed = min(computed + min(kept, new), len(tokens))
        self.live[table][1] = computed
        self.tables.commit(table, computed)
        assert len(table.block_ids) == -(-computed // 2)
        hashes = []
        extend_hashes(hashes, tokens, 2)
        self.tables.publish(table, hashes, computed)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99))
    def free(self, pick):
        table = list(self.live)[pick % len(self.live)]
        del self.live[table]
        self.tables.free(table)

    @rule()
    def forget(self):
        self.tables.forget_prefixes()
        assert self.tables.pool.num_cached == 0

    @invariant()
    def whole(self):
        self.tables.check_integrity()
        pool = self.tables.pool
        assert pool.num_free + pool.num_cached + pool.num_referenced == 13
        assert len(self.tables.index) >= pool.num_cached
        for table, (tokens, computed, _) in self.live.items():
            hashes = []
            extend_hashes(hashes, tokens, 2)
            for i, block in enumerate(table.block_ids):
                published = self.tables.index._hash_of.get(block)
                assert published is None or (published == hashes[i] and 2 * (i + 1) <= computed)

    def teardown(self):
        for table in self.live:
            self.tables.free(table)
        self.tables.check_integrity()
        assert self.tables.pool.num_referenced == 0


TestTables = TablesMachine.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
