"""The two ways a step reaches the workers: in this process, or over sockets."""

from __future__ import annotations

import time
from dataclasses import replace

from actors.errors import EngineDead
from actors.messages import DraftTokens, RowStats, StepPlan, token_array
from actors.protocols import DraftHostLike, TargetRunnerLike


def no_drafts(plan: StepPlan) -> DraftTokens:
    """An answer to the plan's draft entries without a single draft."""
    num_entries = sum(1 for entry in plan.draft if entry.num_drafts > 0)
    return DraftTokens(plan.step, token_array([]), token_array([0] * num_entries))


class InProcessStepClient:
    """Runs draft and target in the calling thread, when the result is asked for.

    A draft model that raises is lost, as a draft process that died would be; a target that
    raises ends the step.
    """

    def __init__(self, target: TargetRunnerLike, draft: DraftHostLike | None = None) -> None:
        self._target = target
        self._draft = draft
        self._plan: StepPlan | None = None

    def send(self, plan: StepPlan) -> None:
        assert self._plan is None, "a step is in flight already"
        self._plan = plan

    def recv(self, timeout_s: float) -> RowStats:
        plan, self._plan = self._plan, None
        if plan is None:
            raise EngineDead("no step is in flight")
        if not plan.draft:
            return self._target.run(plan, None)
        lost: str | None = None
        drafts = None
        started = time.perf_counter()
        if self._draft is None:
            lost = "no draft model"
        else:
            try:
                drafts = self._draft.run(plan)
            except Exception as error:
                lost = repr(error)
                self._draft = None
        draft_ms = (time.perf_counter() - started) * 1e3
        result = self._target.run(plan, drafts if drafts is not None else no_drafts(plan))
        return replace(result, drafts=drafts, draft_lost=lost, draft_ms=draft_ms)

    def close(self) -> None:
        self._plan = None
