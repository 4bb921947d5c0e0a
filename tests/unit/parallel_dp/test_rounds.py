"""The rule of agreement, with a clock that the tests turn."""

import random

from parallel.gang.rounds import Rounds


def rounds(size=2, delay=0.005, lockstep=False):
    made = Rounds(delay, lockstep=lockstep)
    for rank in range(size):
        made.join(rank)
    return made


def busy(made, *ranks):
    """Ranks that the round after this one waits for."""
    for rank in ranks:
        made.report(rank, 1, 0.0)
    made.decide(1e9)


def test_all_who_reported_get_the_largest_batch() -> None:
    made = rounds(3)
    busy(made, 0, 1, 2)
    made.report(0, 2, 1.0)
    made.report(2, 9, 1.001)
    assert made.decide(1.002) is None, "rank 1 is busy and has not reported"
    made.report(1, 4, 1.003)
    decision = made.decide(1.003)
    assert decision is not None
    assert (decision.batch, decision.reporters, decision.late) == (9, (0, 1, 2), ())


def test_an_idle_rank_is_not_waited_for() -> None:
    made = rounds()
    busy(made, 0, 1)
    made.idle(1)
    made.report(0, 3, 1.0)
    decision = made.decide(1.0)
    assert decision is not None
    assert (decision.batch, decision.reporters, decision.dummies) == (3, (0,), ())


def test_a_late_rank_costs_one_bounded_wait_and_its_last_batch_still_counts() -> None:
    made = rounds()
    busy(made, 0, 1)
    made.report(1, 8, 2.0)
    assert made.decide(2.0) is None
    made.report(0, 1, 2.0)
    assert made.decide(2.0) is not None

    made.report(0, 1, 3.0)
    assert made.deadline == 3.005
    assert made.decide(3.0049) is None
    decision = made.decide(3.005)
    assert decision is not None
    assert (decision.batch, decision.reporters, decision.late) == (8, (0,), (1,))
    made.report(0, 1, 4.0)
    assert made.decide(4.0) is not None, "the second round does not wait"


def test_a_rank_that_leaves_closes_the_round() -> None:
    made = rounds()
    busy(made, 0, 1)
    made.report(0, 2, 1.0)
    assert made.decide(1.0) is None
    made.leave(1)
    decision = made.decide(1.0)
    assert decision is not None and decision.batch == 2


def test_no_round_is_left_open_by_those_who_go_idle() -> None:
    made = rounds()
    busy(made, 0, 1)
    made.report(0, 2, 1.0)
    made.idle(0)
    made.idle(1)
    assert made.decide(1.0) is None
    assert made.deadline is None


def test_lockstep_has_no_deadline_and_gives_idle_ranks_dummy_steps() -> None:
    made = rounds(3, lockstep=True)
    made.report(0, 2, 1.0)
    decision = made.decide(1.0)
    assert decision is not None and decision.dummies == (1, 2)
    made.report(1, 1, 1.5)
    made.report(0, 5, 2.0)
    decision = made.decide(2.0)
    assert decision is not None
    assert (decision.batch, decision.reporters, decision.dummies) == (5, (0, 1), (2,))
    made.report(0, 5, 3.0)
    assert made.deadline is None
    assert made.decide(1e9) is None, "rank 1 is busy: without it the collectives do not match"
    made.idle(1)
    decision = made.decide(3.0)
    assert decision is not None and decision.dummies == (1, 2)


def test_random_histories_never_hang_and_never_disagree() -> None:
    draw = random.Random(3)
    for _ in range(200):
        size = draw.randint(2, 4)
        made = rounds(size)
        now, alive, reported = 0.0, set(range(size)), {}
        for _ in range(60):
            now += draw.random() * 0.004
            rank = draw.choice(sorted(alive))
            action = draw.random()
            if rank not in reported and action < 0.7:
                reported[rank] = draw.randint(1, 8)
                made.report(rank, reported[rank], now)
            elif rank not in reported and action < 0.85:
                made.idle(rank)
            elif action > 0.98 and len(alive) > 1:
                made.leave(rank)
                alive.discard(rank)
                reported.pop(rank, None)
            decision = made.decide(now)
            if decision is not None:
                assert set(decision.reporters) == set(reported)
                assert decision.batch >= max(reported.values())
                reported = {}
            if reported:
                assert made.deadline is not None and made.deadline <= now + 0.005
