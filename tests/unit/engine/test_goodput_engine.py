"""K by goodput inside the engine, with scripted models and made-up costs: tokens stay the same."""

from __future__ import annotations

import threading

import pytest

from actors.verifier.calibration import Calibration
from actors.verifier.goodput import Goodput
from tests.unit.engine import fakes
from tests.unit.engine.test_engine import PROMPT, SCRIPT, engines, one

__all__ = ["engines"]


@pytest.fixture
def costs(monkeypatch):
    """Steps cost what this says, whatever they took: 1 and `row` more for each row; a token of the
    longest draft of a draft model costs `draft`."""
    costs = {"row": 0.25, "draft": 0.2}
    observe = Goodput.observe_step

    def made_up(self, num_rows, seconds, longest_draft, drafting_s):
        drafting_s = costs["draft"] * longest_draft if self._drafts_in_step else 0.0
        observe(self, num_rows, 1 + costs["row"] * num_rows + drafting_s, longest_draft, drafting_s)

    monkeypatch.setattr(Goodput, "observe_step", made_up)
    monkeypatch.setattr(Calibration, "next_rows", lambda self: None)
    return costs


def drafts_of(engine, first=0):
    return [drafts for *_, drafts in engine.target.entries[first:]]


@pytest.mark.parametrize("own_kv", [False, True])
def test_useless_drafts_end_and_useful_ones_stay(engines, costs, own_kv):
    length = {"max_tokens": 100, "ignore_eos": True}
    expected = fakes.plain(SCRIPT, PROMPT, 100, eos=())
    bad = engines(4, fakes.wrong(SCRIPT), own_kv=own_kv, follows_goodput=True)
    for _ in range(3):
        assert one(bad, **length).token_ids == expected
    first = len(bad.target.entries)
    assert one(bad, **length).token_ids == expected
    assert sum(k > 0 for k in drafts_of(bad, first)) <= 6
    assert bad.stats.num_request_steps_per_k[0] > 300
    if own_kv:
        # The price of staying near is a forward of the draft model in one of many steps.
        assert bad.host.num_forwards < 60
    else:
        assert bad.stats.num_unsent_draft_tokens > 1000

    good = engines(4, fakes.perfect(SCRIPT), own_kv=own_kv, follows_goodput=True)
    for _ in range(2):
        assert one(good, **length).token_ids == expected
    first = len(good.target.entries)
    assert one(good, **length).token_ids == expected
    assert sum(k == 4 for k in drafts_of(good, first)) >= 18
    assert good.stats.expected_acceptance[0] > 0.9 and "1" in good.stats.step_cost_s


@pytest.mark.parametrize("own_kv", [False, True])
def test_drafts_of_a_text_that_changes_come_back(engines, costs, own_kv):
    """Wrong for the first 60 tokens, then right: in one request, chunked and preempted ones too."""

    def guess(history, k):
        right = fakes.roll_out(SCRIPT, history, k)
        return right if len(history) > 60 else [(t + 1) % fakes.VOCAB for t in right]

    costs.update(row=0.05, draft=0.01)
    engine = engines(
        3, guess, own_kv=own_kv, follows_goodput=True, max_model_len=512, num_blocks=8 * 128 + 1,
        max_num_batched_tokens=16,
    )  # fmt: skip
    got = one(engine, max_tokens=400, ignore_eos=True)
    assert got.token_ids == fakes.plain(SCRIPT, PROMPT, 400, eos=())
    drafted = drafts_of(engine)
    assert 0 in drafted[30:55] and drafted[-20:].count(3) > 15


def test_requests_and_the_server_only_lower_what_goodput_gives(engines, costs):
    costs["row"] = 0.0
    engine = engines(3, fakes.perfect(SCRIPT), follows_goodput=True)
    for changes, most in (({}, 3), ({"num_speculative_tokens": 1}, 1),
                          ({"speculation_enabled": False}, 0)):  # fmt: skip
        first = len(engine.target.entries)
        one(engine, max_tokens=30, **changes)
        assert max(drafts_of(engine, first)) == most
    engine.set_speculation(False)
    first, probes = len(engine.target.entries), engine.stats.num_goodput_probes
    for _ in range(3):
        one(engine, max_tokens=100, ignore_eos=True)
    assert max(drafts_of(engine, first)) == 0 and engine.stats.num_goodput_probes == probes


def test_preempted_requests_and_many_at_once_give_the_same_tokens(engines, costs):
    for own_kv in (False, True):
        engine = engines(
            4, fakes.mixed(SCRIPT), own_kv=own_kv, follows_goodput=True, num_blocks=60,
            max_num_batched_tokens=24,
        )  # fmt: skip
        prompts = [[i + 1] * (3 + 2 * i) for i in range(8)]
        requests = [
            fakes.request(str(i), p, max_tokens=60, ignore_eos=True) for i, p in enumerate(prompts)
        ]
        for got, params in zip(fakes.run_all(engine, requests), requests, strict=True):
            expected = fakes.plain(SCRIPT, params.prompt_token_ids, 60, eos=())
            assert got.token_ids == expected
        assert engine.stats.num_preemptions > 0
        assert len([n for n in engine.stats.num_request_steps_per_k if n]) > 2


def test_a_drafters_confidence_keeps_its_good_drafts_and_drops_the_others(engines, costs):
    """Every third proposal holds, and the drafter knows which."""

    class Knowing(fakes.FakeLookup):
        num_confidence_levels = 2

        def confidence(self, key):
            return 5 if self.table[key] % 3 == 0 else -1  # outside: the nearest level counts

    def guess(history, k):
        right = fakes.roll_out(SCRIPT, history, k)
        return right if len(history) % 3 == 0 else [(t + 1) % fakes.VOCAB for t in right]

    engine = engines(2, guess, lookup=Knowing, follows_goodput=True)
    for _ in range(3):
        one(engine, max_tokens=90, ignore_eos=True)
    before = (engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens)
    one(engine, max_tokens=90, ignore_eos=True)
    sent = engine.stats.num_draft_tokens - before[0]
    assert engine.stats.num_accepted_tokens - before[1] == sent > 30


def test_measuring_gives_way_to_requests(engines, monkeypatch):
    calls = []
    has_begun, may_go_on = threading.Event(), threading.Event()

    def next_rows(self):
        calls.append(1)
        has_begun.set()
        may_go_on.wait(5)
        return None

    monkeypatch.setattr(Calibration, "next_rows", next_rows)
    engine = engines(2, fakes.perfect(SCRIPT), follows_goodput=True)
    assert has_begun.wait(5)
    may_go_on.set()
    assert one(engine, max_tokens=20).token_ids == fakes.plain(SCRIPT, PROMPT, 20)
    assert len(calls) == 1
