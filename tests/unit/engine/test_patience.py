"""How long a step may take, from how long steps took."""

from __future__ import annotations

from actors.steps.patience import LONGEST_S, StepPatience


def test_nothing_known_and_the_user_s_word() -> None:
    assert StepPatience().limit_s(1) == 600.0
    patience = StepPatience(7.5)
    patience.observe(512, 300.0)
    assert patience.limit_s(1) == patience.limit_s(512) == 7.5


def test_a_small_model_that_hangs_is_found_in_seconds() -> None:
    patience = StepPatience()
    patience.observe(40, 0.4)
    for _ in range(20):
        patience.observe(5, 0.03)
    assert patience.limit_s(5) == patience.limit_s(40) == 10.0


def test_a_legal_chunk_of_a_large_model_on_few_cores_ends_nothing() -> None:
    """512 rows that take two minutes, where only decoding or a short prompt is known."""
    for known_rows, took_s in ((1, 0.5), (20, 5.0), (400, 95.0)):
        patience = StepPatience()
        patience.observe(known_rows, took_s)
        assert patience.limit_s(512) > 5 * 120.0


def test_sizes_between_known_ones_take_what_the_next_larger_took() -> None:
    patience = StepPatience()
    patience.observe(1, 1.0)
    patience.observe(512, 100.0)
    assert patience.limit_s(1) == 20.0
    assert patience.limit_s(2) == patience.limit_s(300) == 2000.0
    assert patience.limit_s(100_000) == LONGEST_S


def test_a_machine_that_is_slow_for_a_while_is_remembered_and_then_forgotten() -> None:
    patience = StepPatience()
    patience.observe(4, 5.0)
    for _ in range(20):
        patience.observe(4, 0.05)
    assert 60.0 < patience.limit_s(4) < 100.0
    for _ in range(400):
        patience.observe(4, 0.05)
    assert patience.limit_s(4) == 10.0
