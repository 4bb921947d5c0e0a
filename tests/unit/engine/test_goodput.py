"""K by goodput with made-up costs and texts: what is chosen, how soon, and how steadily."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable

import numpy as np
import pytest

from actors.verifier import goodput as goodput_module
from actors.verifier.acceptance_rates import AcceptanceRates, RequestRates
from actors.verifier.calibration import Calibration
from actors.verifier.goodput import Goodput
from actors.verifier.step_cost import StepCost
from tests.unit.engine import fakes

Cost = Callable[[int], float]
ROWS = (1, 2, 3, 4, 5, 8, 12, 18, 27, 40)


def flat(num_rows: int) -> float:
    return 0.03 * (1 + 0.02 * num_rows)


def steep(num_rows: int) -> float:
    return 0.03 * (1 + 0.25 * num_rows)


class Server:
    """Steps of requests whose drafts hold with rate `holds[i]` at every position. `cost` is by
    rows; a draft model takes `draft_s` for each token of the longest draft."""

    def __init__(self, cost: Cost, holds: list[float], k: int = 4, draft_s: float | None = None):
        self.cost, self.holds, self.k, self.draft_s = cost, holds, k, draft_s
        self.rng = random.Random(3)
        self.slowness = 1.0
        self.goodput = Goodput(k, drafts_in_step=draft_s is not None)
        self.goodput.cost.seed({n: cost(n) for n in ROWS})
        self.requests = [RequestRates() for _ in holds]
        self.ends = [0] * len(holds)  # of their texts: the tokens are the positions
        self.seconds = 0.0
        self.num_tokens = 0

    def step(self) -> list[int]:
        n = len(self.requests)
        ks = self.goodput.choose(self.requests, [self.k] * n, n)
        drafting_s = (self.draft_s or 0.0) * max(ks) * self.slowness
        noise = 1 + abs(self.rng.gauss(0, 0.02))
        seconds = self.cost(n + sum(ks)) * self.slowness * noise + drafting_s
        self.goodput.observe_step(n + sum(ks), seconds, max(ks), drafting_s)
        for i, (request, k, holds) in enumerate(zip(self.requests, ks, self.holds, strict=True)):
            text = list(range(self.ends[i], self.ends[i] + self.k + 1))
            right = 0
            while right < self.k and self.rng.random() < holds:
                right += 1
            drafts = np.array([*text[:right], *[-1] * (self.k - right)], dtype=np.int32)
            accepted = min(right, k)
            at_hand = drafts if self.draft_s is None else drafts[:0]
            self.goodput.observe_run(
                request, at_hand, k, accepted, text[: accepted + 1], request.level
            )
            self.num_tokens += accepted + 1
            self.ends[i] += accepted + 1
        self.seconds += seconds
        return ks

    def run(self, num_steps: int) -> list[list[int]]:
        return [self.step() for _ in range(num_steps)]


def mean(steps: list[list[int]], request: int = 0) -> float:
    return sum(ks[request] for ks in steps) / len(steps)


# --- what is chosen ----------------------------------------------------------------------------


def test_the_choice_is_the_best_there_is(monkeypatch):
    monkeypatch.setattr(goodput_module, "_INERTIA", 0.0)
    rng = random.Random(5)
    for case in range(150):
        n, k = rng.randint(1, 3), rng.randint(1, 3)
        in_step = case % 2 == 1
        goodput = Goodput(k, drafts_in_step=in_step)
        costs = list(itertools.accumulate(rng.choice([0.0, 0.1, 1.0]) for _ in range(n * (k + 1))))
        costs = [1 + cost for cost in costs]
        goodput.cost.seed(dict(enumerate(costs, 1)))
        drafting = [0.0] + [0.4 * j if in_step else 0.0 for j in range(1, k + 1)]
        if in_step:
            goodput._drafting.seed({j: drafting[j] for j in range(1, k + 1)})
        requests = [RequestRates(shift=rng.uniform(-3, 3)) for _ in range(n)]
        caps = [rng.randint(0, k) for _ in range(n)]
        chosen = goodput.choose(requests, caps, n)

        def value(ks, goodput=goodput, requests=requests, costs=costs, drafting=drafting, n=n):
            tokens = 0.0
            for request, num in zip(requests, ks, strict=True):
                rates = goodput.rates.of(request, num)
                tokens += 1 + sum(math.prod(rates[: i + 1]) for i in range(num))
            return tokens / (costs[n + sum(ks) - 1] + drafting[max(ks)])

        best = max(value(ks) for ks in itertools.product(*(range(cap + 1) for cap in caps)))
        assert all(num <= cap for num, cap in zip(chosen, caps, strict=True))
        assert value(chosen) == pytest.approx(best)


@pytest.mark.parametrize("cost", [flat, steep])
def test_drafts_that_always_hold_are_all_sent(cost):
    assert mean(Server(cost, [1.0]).run(120)[20:]) == 4


def test_drafts_that_never_hold_are_soon_not_sent():
    server = Server(steep, [0.0])
    steps = [ks[0] for ks in server.run(1000)]
    assert not any(steps[8:500]), "nothing is measured that is known"
    assert sum(k > 0 for k in steps[8:]) == server.goodput.num_probes == 3
    cheap = Server(flat, [0.0])
    assert not any(ks[0] for ks in cheap.run(300)[25:])


@pytest.mark.parametrize("holds", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("draft_s", [None, 0.006])
@pytest.mark.parametrize("num_requests", [1, 4])
def test_speculation_never_costs_speed(holds, draft_s, num_requests):
    server = Server(steep, [holds] * num_requests, draft_s=draft_s)
    server.run(800)
    plain_s = steep(num_requests) / num_requests * (1 + 0.02 * math.sqrt(2 / math.pi))
    assert server.num_tokens / server.seconds * plain_s > 0.97


def test_a_good_request_keeps_its_drafts_beside_a_bad_one():
    steps = Server(steep, [0.95, 0.05] * 4).run(200)[50:]
    for good, bad in zip(range(0, 8, 2), range(1, 8, 2), strict=True):
        assert mean(steps, good) > 2 and mean(steps, bad) < 0.3


def test_a_new_request_starts_at_what_the_server_sees():
    server = Server(steep, [0.0])
    server.run(100)
    fresh = RequestRates()
    assert server.goodput.choose([fresh], [4], 1) == [0]
    server.holds = [1.0]
    server.run(100)
    assert server.goodput.choose([RequestRates()], [4], 1) == [4]


# --- how soon, and how steadily ----------------------------------------------------------------


def test_a_text_that_changes_is_followed():
    server = Server(steep, [0.0])
    server.run(150)
    server.holds = [1.0]  # not one draft is sent: that they would hold is seen without
    assert mean(server.run(60)[25:]) > 3.5
    server.holds = [0.0]
    assert mean(server.run(60)[25:]) == 0


def test_a_draft_model_is_asked_again_at_a_bounded_price():
    server = Server(steep, [0.0], draft_s=0.006)
    server.run(100)
    num_before, seconds, tokens = server.goodput.num_probes, server.seconds, server.num_tokens
    steps = server.run(2000)
    probes = [ks[0] for ks in steps if ks[0]]
    assert server.goodput.num_probes - num_before == len(probes) > 4 and set(probes) == {4}
    rate = (server.num_tokens - tokens) / (server.seconds - seconds)
    assert rate * steep(1) > 0.97
    server.holds = [1.0]
    assert mean(server.run(2000)[1500:]) > 3.5


def test_two_ks_that_are_as_good_do_not_alternate():
    rate = 0.5
    goodput = Goodput(2)
    goodput.rates.of = lambda request, num: [0.9, rate][:num]
    request = RequestRates()
    rng = random.Random(1)
    # One draft: 1.9 tokens. Two: 2.35. The costs make them equal but for some noise.
    chosen = []
    for _ in range(200):
        noise = rng.gauss(0, 0.004)
        goodput.cost = StepCost()
        goodput.cost.seed({1: 0.75, 2: 1.0, 3: 2.35 / 1.9 * (1 + noise)})
        chosen.append(goodput.choose([request], [2], 1)[0])
    assert len(set(chosen)) == 1
    for last in (1, 2):
        request.last_k = last
        goodput.cost = StepCost()
        goodput.cost.seed({1: 0.75, 2: 1.0, 3: 2.35 / 1.9})
        assert goodput.choose([request], [2], 1) == [last]


def test_costs_that_jump_are_followed_both_ways():
    server = Server(flat, [0.5])
    assert mean(server.run(150)[50:]) > 1.5
    server.cost = lambda n: 0.03 * (1 + 0.8 * (n - 1))
    assert mean(server.run(300)[200:]) < 0.3
    server.cost = flat
    assert mean(server.run(1500)[1200:]) > 1.5


def test_a_busy_neighbour_changes_nothing():
    server = Server(steep, [0.9])
    calm = mean(server.run(300)[100:])
    steps = []
    for turn in range(12):
        server.slowness = 2.5 if turn % 2 else 1.0
        steps += server.run(40)
    assert abs(mean(steps) - calm) < 0.5


def test_a_decision_takes_little_time():
    for num_requests, limit_s in ((1, 1e-4), (32, 5e-4)):
        goodput = Goodput(4)
        goodput.cost.seed({n: steep(n) for n in ROWS})
        requests = [RequestRates(last_k=2) for _ in range(num_requests)]
        best = 1.0
        for _ in range(20):
            started = time.process_time()
            for _ in range(10):
                goodput.choose(requests, [4] * num_requests, num_requests)
            best = min(best, (time.process_time() - started) / 10)
        assert best < limit_s, f"{best * 1e6:.0f} us for {num_requests} requests"


# --- outcomes ----------------------------------------------------------------------------------


def counts(goodput: Goodput) -> tuple[list[float], list[float]]:
    rates = goodput.rates
    return [round(n) for n in rates._all_tried], [round(n) for n in rates._all_right]


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def test_drafts_that_are_not_sent_are_compared_with_what_comes():
    goodput, request = Goodput(4), RequestRates()
    goodput.observe_run(request, tokens(1, 2, 3, 4), 0, 0, [1], request.level)
    assert counts(goodput) == ([1, 0, 0, 0], [1, 0, 0, 0])
    goodput.observe_run(request, tokens(), 0, 0, [2], request.level)
    goodput.observe_run(request, tokens(), 0, 0, [9], request.level)
    assert counts(goodput) == ([1, 1, 1, 0], [1, 1, 0, 0])
    assert request.watched is None
    # Sent in part: what was sent is judged by the verdict, the next one by the token that came.
    goodput.observe_run(request, tokens(1, 2, 3, 4), 2, 2, [1, 2, 3], request.level)
    assert counts(goodput) == ([2, 2, 2, 0], [2, 2, 1, 0])
    goodput.observe_run(request, tokens(), 0, 0, [4], request.level)
    assert counts(goodput) == ([2, 2, 2, 1], [2, 2, 1, 1]) and request.watched is None
    # Rejected in the middle: nothing is known of those behind it.
    goodput.observe_run(request, tokens(1, 2, 3, 4), 3, 1, [1, 7], request.level)
    assert counts(goodput) == ([3, 3, 2, 1], [3, 2, 1, 1]) and request.watched is None


def test_drafts_of_another_confidence_are_another_matter():
    rates = AcceptanceRates(2, num_levels=2)
    for _ in range(50):
        rates.observe(RequestRates(), 0, 0, 0, 1)
        rates.observe(RequestRates(), 1, 0, 2, 2)
    low, high = (rates.of(RequestRates(level=level), 2) for level in (0, 1))
    assert low[0] < 0.1 and min(high) > 0.9
    assert 0.4 < rates.overall[0] < 0.6


def test_a_request_is_told_apart_and_comes_back_to_the_servers_rates():
    rates = AcceptanceRates(1)
    for _ in range(300):
        rates.observe(RequestRates(), 0, 0, 0, 1)
        rates.observe(RequestRates(), 0, 0, 1, 1)
    good, bad = RequestRates(), RequestRates()
    for _ in range(12):
        rates.observe(good, 0, 0, 1, 1)
        rates.observe(bad, 0, 0, 0, 1)
    assert rates.of(good, 1)[0] > 0.8 and rates.of(bad, 1)[0] < 0.2
    for _ in range(400):
        rates.miss(bad)
    assert rates.of(bad, 1)[0] == pytest.approx(rates.of(RequestRates(), 1)[0], abs=0.02)


# --- costs -------------------------------------------------------------------------------------


def test_costs_lie_on_a_line_and_never_fall():
    cost = StepCost()
    assert not cost and cost.seconds(1, 3) == [1, 1, 1] and cost.is_old(1)
    cost.seed({2: 1.0, 4: 2.0, 8: 1.6})
    assert cost.seconds(1, 9) == pytest.approx([1, 1, 1.5, 2, 2, 2, 2, 2, 2])
    cost.observe(8, 1.6)
    assert cost.seconds(1, 9) == pytest.approx([1, 1, 1.3, 1.6, 1.6, 1.6, 1.6, 1.6, 1.6])
    assert cost.fewest == 2 and cost.table()["2"] == pytest.approx(1.0)
    many = StepCost()
    for num_rows in range(1, 4097):
        many.observe(num_rows, 0.01)
    assert len(many.table()) < 90


def test_one_slow_step_is_no_cost():
    cost = StepCost()
    for _ in range(5):
        for num_rows in (1, 4):
            cost.observe(num_rows, 0.02 + 0.001 * num_rows)
    before = cost.seconds(1, 4)
    cost.observe(4, 0.5)
    cost.observe(1, 0.021)
    cost.observe(4, 0.024)
    assert cost.seconds(1, 4) == pytest.approx(before, rel=0.02)


def test_a_first_time_that_was_held_up_is_corrected():
    cost = StepCost()
    cost.observe(4, 0.5)
    assert not cost.is_old(4)
    for _ in range(8):
        cost.observe(1, 0.02)
    assert cost.is_old(4)
    for _ in range(2):
        cost.observe(4, 0.025)
    assert cost.seconds(1, 4) == pytest.approx([0.02, 0.065 / 3, 0.07 / 3, 0.025], rel=0.01)


def test_what_was_not_seen_for_long_or_before_all_else_changed_is_old():
    cost = StepCost()
    cost.seed({1: 0.02, 5: 0.025})
    for _ in range(100):
        cost.observe(1, 0.02)
    assert not cost.is_old(5)
    for _ in range(100):
        cost.observe(1, 0.04)
    assert cost.is_old(5) and not cost.is_old(1)
    cost.observe(5, 0.05)
    assert not cost.is_old(5)
    for _ in range(512):
        cost.observe(1, 0.04)
    assert cost.is_old(5)


def test_calibration_runs_each_size_in_turn_and_keeps_the_fastest():
    limits = fakes.make_limits(4, max_num_seqs=8, max_num_batched_tokens=32)
    calibration = Calibration(limits)
    ran = []
    while (num_rows := calibration.next_rows()) is not None:
        calibration.observe(num_rows, (0.02, 0.01, 0.03)[ran.count(num_rows)])
        ran.append(num_rows)
    sizes = sorted(set(ran))
    assert ran == sizes * 3 and sizes[:5] == [1, 2, 3, 4, 5] and sizes[-1] == 32
    assert calibration.seconds == dict.fromkeys(sizes, 0.01)
    slow = Calibration(limits)
    for _ in range(2):
        assert slow.next_rows() is not None
        slow.observe(1, 1.0)
    assert slow.next_rows() is None
