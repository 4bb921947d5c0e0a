"""A drafter that follows any `DraftLaw` and trusts nobody: what it reads it compares with what the
request's tokens and the target's states say must be there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from actors.steps.messages import (
    DraftEntry,
    DraftTokens,
    RowStats,
    StepPlan,
    TargetEntry,
    token_array,
)
from actors.steps.protocols import MaskSource, Proposal, Verified
from actors.verifier.limits import EngineLimits
from specconfig.draft_law import DraftLaw
from tests.unit.engine import fakes

K = 4
# One law per method family, as the configuration resolves them for K = 4 (or less, by step).
LAWS = {
    "draft_model": fakes.draft_model_law(K),
    "pard": DraftLaw(arrives_in_step=True, keeps_kv=True, num_lookahead_tokens=K, num_extra_rows=K),
    "eagle": DraftLaw(
        arrives_in_step=True, reads_target_states=True, keeps_kv=True, num_next_tokens=1,
        drops_tail_block=True, num_lookahead_tokens=K,
    ),
    "eagle_hashed": DraftLaw(
        arrives_in_step=True, reads_target_states=True, keeps_kv=True, num_next_tokens=1,
        num_hash_lookahead_tokens=1, num_lookahead_tokens=K,
    ),
    "peagle": DraftLaw(
        arrives_in_step=True, reads_target_states=True, keeps_kv=True, num_next_tokens=1,
        drops_tail_block=True, num_lookahead_tokens=K, num_extra_rows=K - 1,
    ),
    "mtp_modules": DraftLaw(
        arrives_in_step=True, reads_target_states=True, keeps_kv=True, num_next_tokens=K,
        num_hash_lookahead_tokens=K, num_lookahead_tokens=K,
    ),
    "mtp_modules_dropping": DraftLaw(
        arrives_in_step=True, reads_target_states=True, keeps_kv=True, num_next_tokens=K,
        drops_tail_block=True, num_lookahead_tokens=K,
    ),
    "gemma4_mtp": DraftLaw(arrives_in_step=True, reads_target_states=True, num_lookahead_tokens=K),
    "medusa": DraftLaw(arrives_in_step=True, reads_target_states=True),
    "dflash": DraftLaw(
        arrives_in_step=True, reads_target_states=True, keeps_kv=True,
        num_lookahead_tokens=K + 1, max_num_active_seqs=3,
    ),
    "extract_hidden_states": DraftLaw(
        proposes=False, arrives_in_step=True, reads_target_states=True, keeps_kv=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """What the drafter keeps at a position: the target's state, and tokens (None: not known)."""

    state: int | None
    tokens: tuple[int | None, ...]


@dataclass
class LawDrafter:
    """Keeps entries by block, in the target's blocks, as a drafter's KV is kept."""

    limits: EngineLimits
    target: fakes.ScriptedTarget
    guess: fakes.Guess
    kept: dict[int, Kept] = field(default_factory=dict)
    # By slot: states of the last rows, which pass by only once.
    states: dict[int, dict[int, int]] = field(default_factory=dict)
    num_checked: int = 0
    num_drafted: int = 0
    _chains: list[int] = field(default_factory=list)  # of the entry being worked on

    @property
    def law(self) -> DraftLaw:
        return self.limits.law

    # --- the two verbs ------------------------------------------------------------------------

    def propose(self, plan: StepPlan) -> Proposal:
        self.target.kv.take_tables(plan)
        for params in plan.admissions:
            self.states.pop(params.slot, None)
        rows = {entry.slot: entry for entry in plan.target}
        if self.law.max_num_active_seqs is not None:
            assert len(rows) <= self.law.max_num_active_seqs
        ids: list[int] = []
        counts: list[int] = []
        num_rows = 0
        for entry in plan.draft:
            known = self._known(rows[entry.slot])
            self._chains = list(accumulate(known, fakes.next_chain, initial=7))[1:]
            # Tokens after this step's rows belong to the prompt; they are checked once they ran.
            run = known[entry.first :]
            assert entry.token_ids.tolist()[: len(run)] == run[: len(entry.token_ids)]
            num_rows += entry.num_rows + (self.law.num_extra_rows if entry.num_drafts else 0)
            self._check(entry.slot, entry.start, known)
            self._feed(entry, rows[entry.slot], before=True)
            if entry.num_drafts:
                drafts = self._draft(entry, rows[entry.slot], known)
                ids += drafts
                counts.append(len(drafts))
        if not self.law.reads_target_states:
            assert num_rows <= self.limits.max_num_batched_tokens
        return Proposal(DraftTokens(plan.step, token_array(ids), token_array(counts)))

    def absorb(self, plan: StepPlan, verified: Verified) -> None:
        rows = {entry.slot: entry for entry in plan.target}
        for slot, (start, states) in verified.taps.items():
            old = self.states.get(slot, {})
            window = range(start - self.law.num_next_tokens, start)
            self.states[slot] = {p: old[p] for p in window if p in old}
            self.states[slot].update(enumerate(states, start))
        for entry in plan.draft:
            self._feed(entry, rows[entry.slot], before=False)
        # Every state that passes by gets an entry, then or with the next token.
        fed = {entry.slot: entry.start + entry.num_rows for entry in plan.draft}
        if self.law.reads_target_states and self.law.keeps_kv:
            for entry in plan.target:
                known = entry.start + len(entry.token_ids)
                assert fed.get(entry.slot, entry.start) >= known - 1

    # --- what a drafter does ------------------------------------------------------------------

    def _known(self, rows: TargetEntry) -> list[int]:
        return self.target.kv.read(rows.slot, rows.start) + rows.token_ids.tolist()

    def _feed(self, entry: DraftEntry, rows: TargetEntry, *, before: bool) -> None:
        law = self.law
        end = entry.start + entry.num_rows
        if not law.keeps_kv:
            assert entry.num_rows == 0
            return
        for position in range(entry.start, end):
            is_early = not law.reads_target_states or position < rows.start
            if is_early == before:
                self.kept[self._at(entry.slot, position)] = self._made(entry, position)

    def _made(self, entry: DraftEntry, position: int) -> Kept:
        law = self.law
        state = self.states[entry.slot][position] if law.reads_target_states else None
        wanted = range(position + 1, position + 1 + law.num_next_tokens)
        if not law.reads_target_states:
            wanted = range(position, position + 1)
        first, tokens = entry.first, entry.token_ids.tolist()
        return Kept(
            state, tuple(tokens[p - first] if p - first < len(tokens) else None for p in wanted)
        )

    def _draft(self, entry: DraftEntry, rows: TargetEntry, known: list[int]) -> list[int]:
        law, slot, newest = self.law, entry.slot, len(known) - 1
        assert law.proposes and rows.start == newest and entry.token_ids[-1] == known[-1]
        if law.keeps_kv:
            self._check(slot, law.feed_end(len(known)), known)
        elif law.reads_target_states:
            # Nothing kept: the state of the last row that the target ran is all it needs.
            assert self.states[slot][newest - 1] == self._chains[newest - 1]
        drafts = self.guess(known, entry.num_drafts)
        self.num_drafted += len(drafts)
        # Drafting writes behind what was fed: its own rows, or those of mask tokens.
        first = law.feed_end(len(known)) - newest
        for i in range(first, law.num_lookahead_tokens if law.keeps_kv else 0):
            position = newest + i
            if position == self.limits.max_model_len:
                break
            if law.kv_survives_drafting:
                if i < len(drafts):
                    self.kept[self._at(slot, position)] = Kept(None, (drafts[i - 1],))
            else:
                self.kept[self._at(slot, position)] = Kept(-1, (-1,))
        return drafts

    # --- what must be there -------------------------------------------------------------------

    def _check(self, slot: int, end: int, known: list[int]) -> None:
        """Entries below `end` were made from the right state and the right tokens."""
        law = self.law
        if not law.keeps_kv:
            return
        places = self.target.kv.slots[slot].places
        final_end = law.final_end(len(known))
        for position in range(end):
            kept = self.kept[places[position]]
            state = self._chains[position] if law.reads_target_states else None
            assert kept.state == state, (slot, position)
            wanted: Sequence[int | None] = known[position : position + 1]
            if law.reads_target_states:
                wanted = known[position + 1 : position + 1 + law.num_next_tokens]
            assert len(kept.tokens) >= len(wanted)
            for have, want in zip(kept.tokens, wanted, strict=False):
                assert have == want or (have is None and position >= final_end), (slot, position)
        self.num_checked += end

    def _at(self, slot: int, position: int) -> int:
        return self.target.kv.where(slot, position)


class LawClient:
    """A step in this process. The drafter can be lost: for a step, or until it is replaced."""

    def __init__(self, target: fakes.ScriptedTarget, make: Callable[[], LawDrafter]) -> None:
        self.target = target
        self.make = make
        self.drafter: LawDrafter | None = make()
        self.num_checked = 0
        self.num_drafted = 0
        self._plan: StepPlan | None = None

    def send(self, plan: StepPlan) -> None:
        self._plan = plan

    def recv(self, timeout_s: float, mask_source: MaskSource | None = None) -> RowStats:
        plan, self._plan = self._plan, None
        assert plan is not None
        proposal, lost = None, None
        if self.drafter is not None:
            proposal = self.drafter.propose(plan)
        elif plan.draft:
            lost = "lost"
            asked = sum(1 for entry in plan.draft if entry.num_drafts)
            none = token_array([0] * asked)
            proposal = Proposal(DraftTokens(plan.step, token_array([]), none))
        verified = self.target.run(plan, proposal)
        if self.drafter is not None:
            self.drafter.absorb(plan, verified)
        return _with_drafts(verified.stats, proposal, lost)

    def lose(self) -> None:
        if self.drafter is not None:
            self.num_checked += self.drafter.num_checked
            self.num_drafted += self.drafter.num_drafted
        self.drafter = None

    def replace(self) -> None:
        self.lose()
        self.drafter = self.make()

    def close(self) -> None:
        self.lose()


def _with_drafts(stats: RowStats, proposal: Proposal | None, lost: str | None) -> RowStats:
    drafts = None if proposal is None else proposal.tokens
    return replace(stats, draft_lost=lost, drafts=drafts)
