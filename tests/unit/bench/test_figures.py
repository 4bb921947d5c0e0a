from __future__ import annotations

import asyncio
import itertools
import statistics

import pytest

from deploy.bench.load import Outcome, Progress, closed_loop, open_loop, poisson_arrivals, within
from deploy.bench.prompts import BenchPrompt
from deploy.bench.server import Workload
from deploy.bench.stream import Received
from deploy.bench.summary import Json, percentile, summarise
from deploy.bench.table import table

PROMPTS = tuple(BenchPrompt(({"role": "user", "content": c},), c) for c in ("a", "b"))
WORKLOAD = Workload("chat", "m", PROMPTS, 5)


def answered(
    index: int, due: float, first: float, last: float, tokens: int, **usage: object
) -> Outcome:
    received = Received(
        first, last, num_events=2, gaps_s=[last - first], is_whole=True,
        usage={"completion_tokens": tokens, "prompt_tokens": 10, **usage},
    )  # fmt: skip
    return Outcome(index, due, last, received)


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([7], 99) == 7
    assert percentile(range(101), 90) == 90
    assert percentile([1, 2], 90) == pytest.approx(1.9)


def test_poisson_arrivals_are_the_seeds_and_have_the_rate() -> None:
    times = poisson_arrivals(5.0, 4000, seed=3)
    assert times == poisson_arrivals(5.0, 4000, seed=3) != poisson_arrivals(5.0, 4000, seed=4)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0 and min(gaps) > 0
    # The spread of exponential gaps is their mean.
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)


def test_a_run_is_summed_up() -> None:
    speculation = {
        "num_steps": 4, "num_drafts": 2, "num_draft_tokens": 8, "num_accepted_tokens": 6,
    }  # fmt: skip
    done = [
        answered(0, 0.0, 1.0, 3.0, 5, speculation=speculation),
        answered(1, 1.0, 1.5, 5.5, 3, prompt_tokens_details={"cached_tokens": 8}),
    ]
    failed = Outcome(2, 0.0, 1.0, Received(error="503: no room"))
    progress = Progress([*done, failed], 4, started_at=0.0, ended_at=10.0, cpu_s=0.5)
    figures = summarise(progress, WORKLOAD)
    assert (figures["num_completed"], figures["num_failed"], figures["num_cut"]) == (2, 1, 1)
    assert figures["errors"] == {"503: no room": 1}
    assert (figures["output_tokens_per_s"], figures["requests_per_s"]) == (0.8, 0.2)
    assert (figures["prompt_tokens"], figures["cached_tokens"]) == (20, 8)
    assert figures["time_to_first_token_ms"]["p50"] == 750
    # 2 s for 4 later tokens, 4 s for 2: usage counts, not the events.
    assert figures["time_per_output_token_ms"] == {
        "p50": 1250, "p90": 1850, "p99": 1985, "mean": 1250,
    }  # fmt: skip
    assert (figures["tokens_per_event"], figures["client_cpu_share"]) == (2.0, 0.05)
    assert figures["speculation"] == {
        **speculation, "acceptance_length": 4.0, "acceptance_rate": 0.75, "mean_k": 2.0,
    }  # fmt: skip
    assert figures["categories"]["a"]["output_tokens"] == 5
    assert figures["categories"]["b"]["speculation"] is None


def test_without_usage_events_are_counted() -> None:
    outcome = Outcome(0, 0.0, 2.0, Received(1.0, 2.0, num_events=2, is_whole=True))
    figures = summarise(Progress([outcome], 1, 0.0, 2.0), WORKLOAD)
    assert figures["output_tokens"] == 2 and figures["speculation"] is None


def test_drafts_that_a_server_counts_in_its_metrics() -> None:
    drafts = {"num_drafts": 4.0, "num_draft_tokens": 16.0, "num_accepted_tokens": 4.0}
    figures = summarise(Progress([answered(0, 0, 1, 2, 3)], 1, 0.0, 2.0), WORKLOAD, drafts)
    assert figures["speculation"]["acceptance_length"] == 2.0
    assert figures["speculation"]["mean_k"] is None


def test_nothing_measured_is_no_fault() -> None:
    figures = summarise(Progress([], 2, 0.0, 1.0), WORKLOAD)
    assert figures["num_cut"] == 2 and figures["time_to_first_token_ms"] is None
    assert "0 / 0 / 2" in table(document(figures))


def document(*runs: Json, **more: object) -> Json:
    about = {
        "url": "http://h", "model": "m", "endpoint": "chat", "prompts": "chat", "max_tokens": 5,
        "temperature": 0.0, "ignore_eos": True, "has_usage": True,
    }  # fmt: skip
    made = [{**run, "load": {"clients": i}} for i, run in enumerate(runs, 1)]
    return {**about, "runs": made, **more}


def test_the_table() -> None:
    quick = summarise(Progress([answered(0, 0.0, 0.5, 1.0, 5)], 1, 0.0, 2.0, 0.1), WORKLOAD)
    slow = summarise(Progress([answered(0, 0.0, 1.0, 3.0, 3)], 1, 0.0, 4.0, 3.0), WORKLOAD)
    assert (
        table(document(quick, slow))
        == """\
http://h  m
chat, prompts chat, exactly 5 tokens each, temperature 0

                                           1 client           2 clients
requests done / failed / cut              1 / 0 / 0           1 / 0 / 0
prompt tokens (from a cache)                 10 (0)              10 (0)
output tokens/s                                 2.5                 0.8
requests/s                                     0.50                0.25
first token ms, p50 / p90 / p99     500 / 500 / 500  1000 / 1000 / 1000
ms per output token, the same       125 / 125 / 125  1000 / 1000 / 1000
ms between events, the same         500 / 500 / 500  2000 / 2000 / 2000
whole answer ms, the same        1000 / 1000 / 1000  3000 / 3000 / 3000
tokens per event                               2.50                1.50
this client's CPU, % of a core                  5.0                75.0

2 clients: this client used 75 % of a core: it may be the limit; run it on another machine."""
    )


def test_what_to_mind_is_said_below_the_table() -> None:
    failed = Progress([Outcome(0, 0, 1, Received(error="500: broken"))], 2, 0.0, 1.0)
    failed.stopped = "stopped after 1 s (--max-seconds)"
    said = table(document(summarise(failed, WORKLOAD), ignore_eos=False, has_usage=False))
    for part in ("at most 5 tokens", "does not take ignore_eos", "sends no usage",
                 "1 x 500: broken", "stopped after 1 s"):  # fmt: skip
        assert part in said


def test_categories_have_a_table_of_their_own() -> None:
    done = [answered(0, 0.0, 1.0, 3.0, 5), answered(1, 0.0, 1.0, 3.0, 3)]
    said = table(document(summarise(Progress(done, 2, 0.0, 3.0), WORKLOAD)))
    assert "category, 1 client" in said and "\na " in said and "\nb " in said


async def _never(_: int) -> Received:
    await asyncio.sleep(60)
    raise AssertionError("not cut")


def test_a_closed_loop_has_no_more_than_its_clients() -> None:
    at_once, most = 0, 0

    async def send(_: int) -> Received:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.001)
        at_once -= 1
        return Received(is_whole=True)

    progress = Progress()
    asyncio.run(within(closed_loop(send, 3, 10, progress), progress, 60, lambda: False))
    assert most == 3 and sorted(o.index for o in progress.outcomes) == list(range(10))
    assert progress.stopped is None and progress.num_cut == 0


def test_an_open_loop_does_not_wait_for_answers_and_counts_from_when_a_request_was_due() -> None:
    async def send(_: int) -> Received:
        await asyncio.sleep(0.05)
        return Received(is_whole=True)

    progress = Progress()
    asyncio.run(within(open_loop(send, [0.0, 0.01, 0.02], progress), progress, 60, lambda: False))
    assert progress.num_sent == 3
    dues = sorted(o.due_at for o in progress.outcomes)
    assert dues[2] - dues[0] == pytest.approx(0.02, abs=1e-6)
    assert all(o.ended_at - o.due_at >= 0.049 for o in progress.outcomes)


@pytest.mark.parametrize(("seconds", "is_stopped"), [(0.05, False), (60.0, True)])
def test_a_run_is_cut_at_its_bound_and_by_a_signal(seconds: float, is_stopped: bool) -> None:
    progress = Progress()
    run = within(closed_loop(_never, 2, 5, progress), progress, seconds, lambda: is_stopped)
    asyncio.run(run)
    assert progress.num_cut == 2 and progress.stopped is not None
    assert progress.ended_at - progress.started_at < 5


def test_a_fault_of_the_generator_itself_is_not_hidden() -> None:
    async def broken(_: int) -> Received:
        raise RuntimeError("ours")

    progress = Progress()
    with pytest.raises(ExceptionGroup):
        asyncio.run(within(closed_loop(broken, 1, 1, progress), progress, 60, lambda: False))
