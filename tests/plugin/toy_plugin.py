"""What somebody else's package adds to Paceline: a drafter that lives with the target, and an
acceptance rule. Found by its entry points; nothing in Paceline knows of it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from actors.acceptance.base import Verdict, VerifyRows
from actors.acceptance.exact import ExactMatch
from actors.kvcache.sizing import KVLayers
from actors.steps.messages import DraftTokens, Stat, StepPlan, token_array
from actors.steps.protocols import Proposal, Verified
from specconfig.acceptance import AcceptanceMethod
from specconfig.speculators.base import SpeculatorConfig

if TYPE_CHECKING:
    from actors.model.host import ModelHost


class StatesConfig(SpeculatorConfig):
    """Capabilities: it runs with the target, reads its last state and keeps no KV."""

    variant: ClassVar[str] = "toy_states"
    implementation: ClassVar[str | None] = "toy_plugin:StatesDrafter"
    host: ClassVar[Any] = "target"
    uses_target_hidden_states: ClassVar[bool] = True


class StatesDrafter:
    """Drafts the token that the target's states last predicted after this one, again and again.

    The target's head says what each state predicts. Where the target has sampled greedily the two
    must agree: a tap of the wrong row or layer ends this drafter with an error.
    """

    def __init__(self, config: Any, device: Any, group: Any, target: ModelHost) -> None:
        self._target = target
        self._after: dict[int, int] = {}
        self._is_greedy: dict[int, bool] = defaultdict(bool)

    def allocate(self, num_blocks: int) -> None:
        """No KV."""

    def warm_up(self) -> None:
        """Nothing to compile."""

    def kv_layers(self, owner: str) -> KVLayers:
        return KVLayers(owner, (), 4)

    def propose(self, plan: StepPlan) -> Proposal:
        for params in plan.admissions:
            self._is_greedy[params.slot] = params.temperature == 0 and not params.masked_ids
        runs: list[list[int]] = []
        for entry in plan.draft:
            if entry.num_drafts == 0:
                continue
            run: list[int] = []
            token = int(entry.token_ids[-1])
            while len(run) < entry.num_drafts and token in self._after:
                token = self._after[token]
                run.append(token)
            runs.append(run)
        flat = [token for run in runs for token in run]
        counts = token_array([len(run) for run in runs])
        return Proposal(DraftTokens(plan.step, token_array(flat), counts))

    def absorb(self, plan: StepPlan, verified: Verified) -> None:
        taps, sampled = verified.taps, verified.stats.sampled
        predicted = self._target.model.head(taps.last).argmax(-1).tolist()
        row = 0
        for entry, num_logits in zip(plan.target, verified.stats.num_rows.tolist(), strict=True):
            span = taps.spans[entry.slot]
            mine = predicted[span.first : span.first + span.count]
            self._after.update(zip(entry.token_ids.tolist(), mine, strict=False))
            if num_logits and self._is_greedy[entry.slot]:
                expected = sampled[row : row + num_logits].tolist()
                assert mine[span.count - num_logits :] == expected, "not the states of these rows"
            row += num_logits


class HalfMatch:
    """Exact match that stops early, with probability `stop`, after each accepted draft. What is
    emitted stays the target's own sample, so it is lossless: a slower twin of the built-in rule."""

    needs = frozenset({Stat.UNIFORM, Stat.TARGET_PROB})

    def __init__(self, stop: float = 0.5) -> None:
        self._stop = stop
        self._exact = ExactMatch()

    def __call__(self, rows: VerifyRows) -> Verdict:
        verdict = self._exact(rows)
        first = np.cumsum(rows.num_drafts + 1) - rows.num_drafts - 1
        accepted = verdict.num_accepted.copy()
        for request, row in enumerate(first.tolist()):
            drafted = rows.columns[Stat.TARGET_PROB][row : row + rows.num_drafts[request]]
            assert ((drafted >= 0) & (drafted <= 1)).all(), "p(d) of every draft was asked for"
            for i in range(accepted[request]):
                if rows.columns[Stat.UNIFORM][row + i] < self._stop:
                    accepted[request] = i
                    break
        return Verdict(accepted, rows.sampled[first + accepted])


TOY_HALF = AcceptanceMethod("toy_plugin:HalfMatch", is_lossless=True)
