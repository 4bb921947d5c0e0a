"""What the sampler is told of a row: its draft, its place, its step, and what came before it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.model.inputs import EntryRows, SlotTables
from actors.steps.messages import BlockDelta, SlotParams, token_array
from tests.unit.model.conftest import CPU

MAX_LEN, BLOCK = 64, 8


def tables_of(params: list[SlotParams]) -> SlotTables:
    tables = SlotTables(4, MAX_LEN, 8, BLOCK)
    width = tables.max_blocks
    tables.apply(
        params,
        [
            BlockDelta(s, 0, token_array(range(1 + s * width, 1 + (s + 1) * width)))
            for s in range(4)
        ],
    )
    return tables


def test_rows_of_a_mixed_batch() -> None:
    params = [SlotParams(slot, 5, seed=slot) for slot in range(3)]
    batch = tables_of(params).flatten(
        [
            EntryRows(0, 9, token_array([50, 51, 52]), 3),  # two drafts
            EntryRows(1, 0, token_array([60, 61]), 0),  # part of a prompt
            EntryRows(2, 2, token_array([70, 71, 72]), 1),  # its end
        ],
        CPU,
        step=6,
    )
    told = [(r.params.slot, r.position, r.draft_id, r.place, r.step) for r in batch.rows]
    assert told == [(0, 10, 51, 0, 6), (0, 11, 52, 1, 6), (0, 12, -1, 2, 6), (2, 5, -1, 0, 6)]
    assert all(row.history is None for row in batch.rows)
    assert batch.logits_indices.tolist() == [0, 1, 2, 7]
    assert {s: (x.start, x.first, x.count) for s, x in batch.spans.items()} == {
        0: (9, 0, 3), 1: (0, 3, 2), 2: (2, 5, 3),
    }  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_history_is_what_stands_before_the_row(data: st.DataObject) -> None:
    """Against a plain list, over steps with drafts that are kept or not, a prefix that was not fed,
    and a request that is admitted anew."""
    token = st.integers(0, 999)
    known = data.draw(st.lists(token, min_size=1, max_size=12))
    tables = tables_of([SlotParams(0, len(known), 0, history=token_array(known))])
    tables.apply([SlotParams(1, 4, 0)], [])
    start = data.draw(st.integers(0, len(known) - 1))
    for _ in range(data.draw(st.integers(1, 5))):
        drafts = data.draw(st.lists(token, max_size=3))
        fed = [*known[start:], *drafts]
        entries = [
            EntryRows(1, 3, token_array([5]), 1),
            EntryRows(0, start, token_array(fed), 1 + len(drafts)),
        ]
        other, *rows = tables.flatten(entries, CPU).rows
        assert other.history is None and len(rows) == 1 + len(drafts)
        for i, row in enumerate(rows):
            before = [*known, *drafts[:i]]
            assert row.position == len(before) and row.place == i
            assert row.history is not None and row.history.tolist() == before
            assert row.draft_id == (drafts[i] if i < len(drafts) else -1)
        accepted = data.draw(st.integers(0, len(drafts)))
        known = [*known, *drafts[:accepted], data.draw(token)]
        start = len(known) - 1
        if data.draw(st.booleans()):  # preempted: its tokens come with the admission
            tables.apply([SlotParams(0, 1, 0, history=token_array(known))], [])
            start = data.draw(st.integers(0, len(known) - 1))


def test_a_slot_that_is_used_again_forgets() -> None:
    tables = tables_of([SlotParams(0, 1, 0, history=token_array([1, 2]))])
    tables.apply([SlotParams(0, 1, 0)], [])
    (row,) = tables.flatten([EntryRows(0, 0, np.array([7], dtype=np.int32), 1)], CPU).rows
    assert row.history is None
