"""A drafter that lives with the target, made outside the package: it repeats the newest token.

It checks that it is told of every row of the target, and fails where it is told to.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import torch

from actors.kvcache.sizing import KVLayers
from actors.model.host import ModelHost
from actors.steps.messages import DraftTokens, StepPlan, token_array
from actors.steps.protocols import Proposal, Verified
from parallel.groups import TPGroup
from specconfig import register_speculative_method
from specconfig.engine import EngineConfig
from specconfig.speculators.base import SpeculatorConfig
from specconfig.speculators.resolution import Resolution


class ToySpeculatorConfig(SpeculatorConfig):
    """`speculator_options`: {fails_in: propose or absorb, rank}, of the first drafter made."""

    implementation = "tests.unit.parallel.toy:ToyDrafter"
    host = "target"
    supported_options: ClassVar[frozenset[str]] = frozenset({"speculator_options"})
    uses_target_hidden_states: ClassVar[bool] = True

    @classmethod
    def configure(cls, res: Resolution) -> None:
        res.reset_lookup()
        res.use_target_as_draft()

    @property
    def num_prefill_lookahead_tokens(self) -> int:
        return 0


register_speculative_method("toy", ToySpeculatorConfig)


class ToyDrafter:
    num_made: ClassVar[Counter[str]] = Counter()  # in this process, by options

    def __init__(
        self, config: EngineConfig, device: torch.device, group: TPGroup | None, target: ModelHost
    ) -> None:
        assert config.speculative is not None
        options: dict[str, Any] = config.speculative.speculator_options or {}
        is_first = not ToyDrafter.num_made[str(options)]
        ToyDrafter.num_made[str(options)] += 1
        rank = 0 if group is None else group.rank
        self._fails_in = options.get("fails_in") if is_first else None
        if rank != options.get("rank", 0):
            self._fails_in = None
        self._group = group
        self._target = target
        self._num_steps = 0
        self.blocks = 0

    def kv_layers(self, owner: str) -> KVLayers:
        return KVLayers(owner, (), 4)

    def allocate(self, num_blocks: int) -> None:
        self.blocks = num_blocks

    def warm_up(self) -> None:
        assert self.blocks > 0

    def propose(self, plan: StepPlan) -> Proposal:
        self._num_steps += 1
        if self._fails_in == "propose" and self._num_steps > 4:
            raise RuntimeError("told to fail before the forward")
        asking = [entry for entry in plan.draft if entry.num_drafts > 0]
        drafts = [[int(entry.token_ids[-1])] * entry.num_drafts for entry in asking]
        if self._group is not None and asking:
            # As a split drafter would: the ranks need each other.
            self._group.all_reduce(torch.ones(1))
        tokens = token_array([token for run in drafts for token in run])
        return Proposal(DraftTokens(plan.step, tokens, token_array([len(run) for run in drafts])))

    def absorb(self, plan: StepPlan, verified: Verified) -> None:
        assert verified.taps is not None and set(verified.taps.spans) == {
            entry.slot for entry in plan.target
        }
        assert verified.taps.last.shape[1] == self._target.config.model.hidden_size
        if self._fails_in == "absorb" and self._num_steps > 4:
            raise RuntimeError("told to fail after the forward")
