"""How many drafts each request gets in a step: as many as make the most output tokens a second.

A draft of length k is expected to give 1 + r1 + r1 r2 + ... tokens, r_i the rate at which position
i is accepted once those before it are. Drafts of all requests compete for the rows of one step, the
likeliest first, and the step takes those that raise (expected tokens) / (time of a step of that
many rows); none, where none do. A good request so keeps its drafts beside a bad one.

Nothing here changes a token: K is only how many guesses are checked at once. ADR 0020.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Final

from actors.stats import EngineStats
from actors.steps.messages import Int32Array
from actors.verifier.acceptance_rates import AcceptanceRates, RequestRates
from actors.verifier.step_cost import StepCost

# A draft that its request had in the last step counts for so much more, one that it had not for so
# much less: K does not go back and forth between two that are as good.
_INERTIA: Final = 0.05
# Acceptance while nothing is known: drafts that only sending shows the worth of are tried; those
# at hand are compared with what comes anyway, and sent once they have held.
_HOPE: Final = 0.6
_DOUBT: Final = 0.3
# Steps that are run to measure, not because they are best, cost at most this share of the time.
_PROBE_LOSS: Final = 0.01
_LEAST_PAUSE: Final = 32
_LONGEST_PAUSE: Final = 1024
# Times that something is measured again, every other step: one alone may have been held up, and
# the steps between show whether all have become slower.
_NUM_PROBES: Final = 3

_Gain = tuple[float, int, int]  # tokens that a draft adds, its request, its position


class Goodput:
    """Chooses K for each request and step, and learns from what the steps gave.

    Args:
        max_drafts: K of the configuration, the most it chooses.
        num_levels: Levels of confidence of the drafter.
        drafts_in_step: Drafting takes time in the step, and happens only where drafts are chosen.
            False: drafts are there already, and those that are not sent are compared with the
            tokens that come.
        always_feeds: The drafter takes the target's states in every step, whatever K is.
    """

    def __init__(
        self,
        max_drafts: int,
        num_levels: int = 1,
        *,
        drafts_in_step: bool = False,
        always_feeds: bool = False,
    ) -> None:
        first_rate = _HOPE if drafts_in_step else _DOUBT
        self.rates = AcceptanceRates(max_drafts, num_levels, first_rate)
        self.cost = StepCost()
        self._drafting = StepCost()  # by the longest draft of the step
        self._drafts_in_step = drafts_in_step
        self._always_feeds = always_feeds
        self._num_paused = 0  # decisions since the last one with drafts
        self._num_turns_left = 0  # of a series of probes, each followed by a step that is none
        self._probes_drafts = False
        self.num_probes = 0

    # --- decision ---------------------------------------------------------------------------

    def choose(
        self, requests: Sequence[RequestRates], caps: Sequence[int], num_rows: int
    ) -> list[int]:
        """Drafts of each request in the next step.

        Args:
            requests: Those that decode in it.
            caps: The most that each may have; with drafts at hand, that there are.
            num_rows: Of the step without any draft, prompt chunks included.
        """
        width = max(caps, default=0)
        if width == 0:
            return [0] * len(caps)
        seconds = self.cost.seconds(num_rows, num_rows + sum(caps))
        drafting = self._drafting_seconds(width)
        chosen = self._best(self._gains(requests, caps), len(caps), seconds, drafting)
        for request, k, cap in zip(requests, chosen, caps, strict=True):
            if cap:
                request.last_k = k
        if num_rows != len(caps):
            return chosen  # with prompts in it a step says nothing of what drafts cost
        return self._measured(chosen, caps, num_rows, seconds, drafting)

    def _gains(self, requests: Sequence[RequestRates], caps: Sequence[int]) -> list[_Gain]:
        """Every draft that could be in the step, the most tokens first."""
        gains: list[_Gain] = []
        for number, (request, cap) in enumerate(zip(requests, caps, strict=True)):
            expected = 1.0
            for position, rate in enumerate(self.rates.of(request, cap)):
                expected *= rate
                inertia = _INERTIA if position < request.last_k else -_INERTIA
                gains.append((expected * (1 + inertia), number, position))
        # Stable, and gains fall along a request: no draft comes before those it follows.
        gains.sort(key=itemgetter(0), reverse=True)
        return gains

    def _best(
        self, gains: list[_Gain], num_requests: int, seconds: list[float], drafting: list[float]
    ) -> list[int]:
        """The drafts of each request that give the most tokens a second."""
        best = num_requests / (seconds[0] + drafting[0])
        best_length = best_count = 0
        # Only where drafts take time in the step does it matter how long the longest one is.
        lengths = range(1, len(drafting)) if self._drafts_in_step else (len(drafting) - 1,)
        for longest in lengths:
            tokens, drafting_s = float(num_requests), drafting[longest]
            count = 0
            for gain, _, position in gains:
                if position >= longest:
                    continue
                tokens += gain
                count += 1
                rate = tokens / (seconds[count] + drafting_s)
                if rate > best:
                    best, best_length, best_count = rate, longest, count
        chosen = [0] * num_requests
        taken = [number for _, number, position in gains if position < best_length]
        for number in taken[:best_count]:
            chosen[number] += 1
        return chosen

    def _drafting_seconds(self, width: int) -> list[float]:
        """Of steps whose longest draft has 0 to `width` tokens. Shorter ones than were seen lie
        between none, which takes no time, and those."""
        if not self._drafting:
            return [0.0] * (width + 1)
        known = self._drafting.seconds(0, width)
        fewest = self._drafting.fewest
        return [s * min(i / fewest, 1.0) if fewest else s for i, s in enumerate(known)]

    # --- measuring again --------------------------------------------------------------------

    def _measured(
        self,
        chosen: list[int],
        caps: Sequence[int],
        num_rows: int,
        seconds: list[float],
        drafting: list[float],
    ) -> list[int]:
        """`chosen`, or what must be measured again: all drafts where none were chosen for long,
        none where the cost of a step without them is old."""
        has_drafts = any(chosen)
        self._num_paused = 0 if has_drafts else self._num_paused + 1
        if self._num_turns_left == 0 or self._probes_drafts == has_drafts:
            self._probes_drafts = not has_drafts
            is_due = self._is_due(has_drafts, sum(caps), num_rows, seconds, drafting)
            self._num_turns_left = 2 * _NUM_PROBES if is_due else 0
        if self._num_turns_left == 0:
            return chosen
        self._num_turns_left -= 1
        if self._num_turns_left % 2 == 0:
            return chosen
        self.num_probes += 1
        self._num_paused = 0
        return [0] * len(chosen) if has_drafts else list(caps)

    def _is_due(
        self,
        has_drafts: bool,
        num_drafts: int,
        num_rows: int,
        seconds: list[float],
        drafting: list[float],
    ) -> bool:
        if has_drafts:
            return self.cost.is_old(num_rows)
        # Drafts at hand are compared whether they are sent or not: only their cost can be old.
        if not self._drafts_in_step and not self.cost.is_old(num_rows + num_drafts):
            return False
        plain_s = seconds[0] + drafting[0]
        extra = (seconds[-1] + drafting[-1]) / plain_s - 1
        pause = _NUM_PROBES * extra / _PROBE_LOSS
        return self._num_paused > min(max(pause, _LEAST_PAUSE), _LONGEST_PAUSE)

    # --- learning ---------------------------------------------------------------------------

    def observe_step(
        self, num_rows: int, seconds: float, longest_draft: int, drafting_s: float
    ) -> None:
        """A step of decoding requests alone took `seconds`, `drafting_s` of it for drafts of up to
        `longest_draft` tokens."""
        self.cost.observe(num_rows, seconds - drafting_s)
        if self._drafts_in_step and (longest_draft or self._always_feeds):
            self._drafting.observe(longest_draft, drafting_s)

    def prepare(self) -> None:
        """Work out now what the next choice would have to."""
        self.rates.refresh()
        self.cost.refresh()

    def report(self, stats: EngineStats) -> None:
        """Show what K is chosen by."""
        stats.num_goodput_probes = self.num_probes
        stats.step_cost_s = self.cost.table()
        stats.expected_acceptance = self.rates.overall

    def observe_run(
        self,
        of: RequestRates,
        drafts: Int32Array,
        num_sent: int,
        num_accepted: int,
        run: Sequence[int],
        level: int,
    ) -> None:
        """A request's step gave `run`: `num_accepted` of `num_sent` drafts and one token more.

        `drafts`: those at hand, sent or not; none where they came in the step. `level`: the
        confidence in them.
        """
        num_right, num_tried = num_accepted, min(num_accepted + 1, num_sent)
        if num_accepted == num_sent < len(drafts):
            num_tried += 1
            num_right += int(drafts[num_sent]) == run[num_sent]
        self.rates.observe(of, level, 0, num_right, num_tried)
        if of.watched is not None:
            self._watch(of, run)
        elif num_right == num_tried < len(drafts):
            of.watched, of.watched_level, of.num_watched = drafts, level, num_tried
        if not num_tried and of.watched is None:
            self.rates.miss(of)

    def _watch(self, of: RequestRates, run: Sequence[int]) -> None:
        """Compare drafts that were not sent with the tokens that came in their place."""
        assert of.watched is not None
        rest = of.watched[of.num_watched :].tolist()
        num_compared = min(len(rest), len(run))
        num_right = 0
        while num_right < num_compared and rest[num_right] == run[num_right]:
            num_right += 1
        num_tried = min(num_right + 1, num_compared)
        self.rates.observe(of, of.watched_level, of.num_watched, num_right, num_tried)
        of.num_watched += num_right
        if num_right < num_compared or of.num_watched == len(of.watched):
            of.watched = None
