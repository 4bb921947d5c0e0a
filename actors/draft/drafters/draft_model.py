"""Drafting with a separate, smaller language model: feed what is new, then K tokens one by one.

The draft model keeps its own KV in the target's block ids. What to feed comes with the plan (the
verifier tracks how far the draft KV is valid), so no token is ever skipped: after a fully accepted
run the last draft and the bonus token are both fed (algorithm: Leviathan et al., arXiv 2211.17192).

Drafts are *coupled*: drawn with the same filters and the same position noise as the target's own
sample. They stay plain guesses for the exact-match check, so this changes how often they are
right, never what is emitted.
"""

from __future__ import annotations

import torch

from actors.model.host import ModelHost, load_draft
from actors.model.inputs import EntryRows
from actors.steps.messages import DraftEntry, DraftTokens, Stat, StepPlan, token_array
from actors.steps.protocols import Proposal, Verified
from parallel.groups import SingleRank, TPGroup
from specconfig.engine import EngineConfig


class DraftModelDrafter:
    """One draft rank without Ray; lives as a target runner does: load, allocate, warm up, then
    `propose` a step."""

    def __init__(
        self, config: EngineConfig, device: torch.device, group: TPGroup | None = None
    ) -> None:
        spec = config.speculative
        model = load_draft(config, device, group or SingleRank())
        assert spec is not None
        self.host = ModelHost(
            config,
            model,
            # Ids past the shared vocabulary mean nothing to the target.
            vocab_size=spec.shared_vocab_size or config.model.vocab_size,
            steady_rows=2,  # the last draft and the bonus token after full acceptance
        )
        self.allocate, self.warm_up = self.host.allocate, self.host.warm_up
        self.kv_layers = self.host.kv_layers
        # Positions past the draft's own context are not fed: there the target goes on alone.
        self._max_len = config.draft_max_model_len or config.max_model_len

    def propose(self, plan: StepPlan) -> Proposal:
        """Feed every draft entry, then draft for those that ask."""
        self.host.take(plan)
        asking = [entry for entry in plan.draft if entry.num_drafts > 0]
        drafted: list[list[int]] = [[] for _ in asking]
        # Position of each entry's next token to feed, its known tokens being fed first.
        ends = [entry.start + len(entry.token_ids) for entry in asking]
        fed = self._draw([self._fed_rows(entry) for entry in plan.draft])
        drafting = [i for i, end in enumerate(ends) if end <= self._max_len]
        for i, token in zip(drafting, fed, strict=True):
            drafted[i].append(token)
        for k in range(1, max((e.num_drafts for e in asking), default=0)):
            drafting = [
                i
                for i in drafting
                if asking[i].num_drafts > k and ends[i] + k <= self._max_len and drafted[i][-1] >= 0
            ]
            rows = [
                EntryRows(asking[i].slot, ends[i] + k - 1, token_array([drafted[i][-1]]), 1)
                for i in drafting
            ]
            for i, token in zip(drafting, self._draw(rows), strict=True):
                drafted[i].append(token)
        # An invalid sample (NaN logits) ends a run: a draft that cannot be fed is no draft.
        runs = [[token for token in run if token >= 0] for run in drafted]
        return Proposal(
            DraftTokens(
                plan.step,
                token_array([token for run in runs for token in run]),
                token_array([len(run) for run in runs]),
            )
        )

    def absorb(self, plan: StepPlan, verified: Verified) -> None:
        """It reads no states of the target."""
        return

    def _fed_rows(self, entry: DraftEntry) -> EntryRows:
        room = max(self._max_len - entry.start, 0)
        wants = entry.num_drafts > 0 and len(entry.token_ids) <= room
        return EntryRows(entry.slot, entry.start, entry.token_ids[:room], int(wants))

    def _draw(self, entries: list[EntryRows]) -> list[int]:
        entries = [entry for entry in entries if len(entry.token_ids)]
        if not entries:
            return []
        sampled = self.host.run(entries).columns[Stat.SAMPLED]
        if self.host.model.group.size > 1:
            # What is fed next must be one thing everywhere, so it comes from one rank.
            sent = torch.from_numpy(sampled).to(self.host.device)
            sampled = self.host.model.group.broadcast(sent).cpu().numpy()
        return [int(token) for token in sampled]
