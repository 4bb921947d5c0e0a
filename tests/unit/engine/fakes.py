"""Scripted stand-ins for models. They read and write KV through block ids as a model would, so a
wrong block, a hole or a stale position changes their output or fails an assertion."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.requests import GenerateRequest, RunOutput
from actors.steps.messages import (
    DraftTokens,
    RowMasks,
    RowStats,
    SlotParams,
    Stat,
    StepPlan,
    TargetEntry,
    token_array,
)
from actors.steps.protocols import LookupDrafter, Proposal, Verified
from actors.verifier.engine import VerifierEngine
from actors.verifier.limits import EngineLimits
from specconfig.draft_law import DraftLaw

VOCAB = 50
EOS = 49
Script = Callable[[Sequence[int]], int]
_MOD = (1 << 61) - 1


def hashed(vocab: int = VOCAB - 1, window: int = 3) -> Script:
    """A next token that depends on the last `window` tokens and the length's parity."""

    def script(history: Sequence[int]) -> int:
        raw = np.asarray(history[-window:], dtype=np.int32).tobytes()
        return zlib.crc32(raw) % vocab

    return script


def whole(vocab: int = VOCAB - 1) -> Script:
    """A next token that depends on every token before it."""
    return lambda history: zlib.crc32(np.asarray(history, dtype=np.int32).tobytes()) % vocab


def cycle(period: Sequence[int]) -> Script:
    return lambda history: period[len(history) % len(period)]


def fixed(prompt_len: int, output: Sequence[int]) -> Script:
    """Emits `output` after the prompt, then its last token for ever."""
    return lambda history: output[min(len(history) - prompt_len, len(output) - 1)]


def roll_out(script: Script, history: Sequence[int], num: int) -> list[int]:
    tokens = list(history)
    for _ in range(num):
        tokens.append(script(tokens))
    return tokens[len(history) :]


@dataclass
class _Slot:
    params: SlotParams
    places: list[int] = field(default_factory=list)  # of each position, in the KV memory


def next_chain(chain: int, token: int) -> int:
    """Hash of a sequence, one token longer."""
    return (chain * 1_000_003 + token + 2) % _MOD


class PagedTokens:
    """KV memory of a fake model: per position the token and a hash of all tokens up to it."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.cells = [(-1, -1)] * (limits.num_blocks * limits.block_size)
        self.slots: dict[int, _Slot] = {}

    def take_tables(self, plan: StepPlan) -> None:
        size = self.limits.block_size
        for params in plan.admissions:
            assert 0 <= params.slot < self.limits.max_num_seqs
            self.slots[params.slot] = _Slot(params)
        for delta in plan.blocks:
            slot = self.slots[delta.slot]
            assert delta.first * size <= len(slot.places), "a gap in the block table"
            del slot.places[delta.first * size :]
            for block in delta.block_ids.tolist():
                assert 0 < block < self.limits.num_blocks, "illegal block id"
                slot.places += range(block * size, (block + 1) * size)
            assert len(set(slot.places)) == len(slot.places)
            assert len(slot.places) < self.limits.max_model_len + size, "past the context's end"

    def where(self, slot: int, position: int) -> int:
        places = self.slots[slot].places
        assert position < len(places), f"slot {slot}: position {position} has no block"
        return places[position]

    def read(self, slot: int, length: int) -> list[int]:
        """Tokens of positions below `length`; asserts that their KV is valid and their own."""
        places = self.slots[slot].places
        assert length <= len(places), f"slot {slot}: position {length - 1} has no block"
        tokens: list[int] = []
        chain = 7
        for place in places[:length]:
            token, found = self.cells[place]
            chain = next_chain(chain, token)
            assert found == chain, f"slot {slot}: KV of position {len(tokens)} is not valid"
            tokens.append(token)
        return tokens

    def chains(self, slot: int, start: int, num: int) -> list[int]:
        """The hash of all tokens up to each position: a stand-in for its hidden state."""
        return [self.cells[self.where(slot, p)][1] for p in range(start, start + num)]

    def write(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        chain = 7 if start == 0 else self.cells[self.where(slot, start - 1)][1]
        for position, token in enumerate(tokens, start):
            assert 0 <= position < self.limits.max_model_len, f"position {position}"
            assert 0 <= token < self.limits.vocab_size, f"token id {token} reached a model"
            chain = next_chain(chain, token)
            self.cells[self.where(slot, position)] = (token, chain)


class ScriptedTarget:
    """TargetRunnerLike over a pure function of history, which it reads back from its KV."""

    def __init__(self, limits: EngineLimits, script: Script) -> None:
        self.limits = limits
        self.script = script
        self.kv = PagedTokens(limits)
        self.num_steps = 0
        self.fail_at: int | None = None
        self.max_rows = 0
        self.entries: list[tuple[int, int, int, int]] = []  # step, slot, rows, drafts

    def run(
        self, plan: StepPlan, proposal: Proposal | None, masks: RowMasks | None = None
    ) -> Verified:
        drafts = None if proposal is None else proposal.tokens
        masks = masks or plan.masks
        assert (masks is not None) == (plan.awaits_masks or plan.masks is not None)
        self.num_steps += 1
        if self.fail_at is not None and self.num_steps >= self.fail_at:
            raise RuntimeError("the target broke")
        self.kv.take_tables(plan)
        assert len({e.slot for e in plan.target}) == len(plan.target), "a slot twice in a step"
        pending = iter(_split(plan, drafts))
        before = [self.kv.read(e.slot, e.start) for e in plan.target]
        sampled: list[int] = []
        num_rows: list[int] = []
        logprobs: list[float] = []
        top: list[list[int]] = []
        num_top = max([self.kv.slots[e.slot].params.num_logprobs for e in plan.target] + [0])
        total_rows = 0
        ran: list[tuple[TargetEntry, int]] = []
        for entry, history in zip(plan.target, before, strict=True):
            rows = entry.token_ids.tolist()
            k = entry.num_drafts
            assert not (entry.num_drafts and entry.num_pending_drafts)
            if entry.num_pending_drafts:
                extra = next(pending)
                assert len(extra) <= entry.num_pending_drafts
                rows += extra
                k = len(extra)
            total_rows += len(entry.token_ids) + entry.num_pending_drafts
            assert entry.num_logits in (0, 1 + entry.num_drafts + entry.num_pending_drafts)
            self.kv.write(entry.slot, entry.start, rows)
            ran.append((entry, len(rows)))
            self.entries.append((plan.step, entry.slot, len(rows), k))
            params = self.kv.slots[entry.slot].params
            num_logits = 1 + k if entry.num_logits else 0
            num_rows.append(num_logits)
            full = history + rows
            for end in range(len(full) - num_logits + 1, len(full) + 1):
                token = self.script(full[:end])
                if end - params.prompt_len < params.min_tokens:
                    while token in params.masked_ids:
                        token = (token + 1) % self.limits.vocab_size
                if masks is not None:
                    token = _allowed(masks, len(sampled), token, self.limits.vocab_size)
                sampled.append(token)
                logprobs.append(logprob_of(full[:end], token))
                top.append([(token + j) % self.limits.vocab_size for j in range(num_top)])
        assert total_rows <= self.limits.max_num_batched_tokens, "the token budget was exceeded"
        self.max_rows = max(self.max_rows, total_rows)
        columns = {
            Stat.SAMPLED: token_array(sampled),
            Stat.LOGPROB: np.asarray(logprobs, dtype=np.float32),
            Stat.TOP_IDS: token_array(top).reshape(len(top), num_top),
            Stat.TOP_LOGPROBS: np.tile(-np.arange(num_top, dtype=np.float32), (len(top), 1)),
        }
        taps = {e.slot: (e.start, self.kv.chains(e.slot, e.start, n)) for e, n in ran}
        return Verified(RowStats(plan.step, token_array(num_rows), columns), taps)


def _allowed(masks: RowMasks, row: int, token: int, vocab_size: int) -> int:
    """The first token from `token` on that the row's mask allows."""
    for bits in masks.bits[masks.rows == row]:
        while not bits[token // 32] >> (token % 32) & 1:
            token = (token + 1) % vocab_size
    return token


def logprob_of(history: Sequence[int], token: int) -> float:
    raw = np.asarray([*history, token], dtype=np.int32).tobytes()
    return -1 - (zlib.crc32(raw) % 97) / 97


def _split(plan: StepPlan, drafts: DraftTokens | None) -> list[list[int]]:
    if drafts is None:
        return []
    asking = [e for e in plan.draft if e.num_drafts > 0]
    assert len(drafts.counts) == len(asking)
    ends = np.cumsum(drafts.counts).tolist()
    ids = drafts.token_ids.tolist()
    return [ids[end - n : end] for end, n in zip(ends, drafts.counts.tolist(), strict=True)]


Guess = Callable[[Sequence[int], int], list[int]]


def perfect(script: Script) -> Guess:
    return lambda history, k: roll_out(script, history, k)


def wrong(script: Script, vocab: int = VOCAB) -> Guess:
    return lambda history, k: [(t + 1) % vocab for t in roll_out(script, history, k)]


def mixed(script: Script, vocab: int = VOCAB, modulus: int = 3) -> Guess:
    """Right for a number of drafts that depends on the history, then wrong."""

    def guess(history: Sequence[int], k: int) -> list[int]:
        raw = np.asarray(history, dtype=np.int32).tobytes()
        num_right = zlib.crc32(raw) % (k + modulus)
        drafts = roll_out(script, history, k)
        return [t if i < num_right else (t + 1) % vocab for i, t in enumerate(drafts)]

    return guess


def replay(script: Script, accepts: Sequence[int], vocab: int = VOCAB) -> Guess:
    """Accept counts forced, one a call."""
    calls = iter(accepts * 1000)

    def guess(history: Sequence[int], k: int) -> list[int]:
        num_right = next(calls)
        drafts = roll_out(script, history, k)
        return [t if i < num_right else (t + 1) % vocab for i, t in enumerate(drafts)]

    return guess


def illegal(token: int) -> Guess:
    return lambda _history, k: [token] * k


class FakeLookup(LookupDrafter):
    """Over a guess; checks that it is told everything, and keeps a table, so that a leak shows."""

    def __init__(self, guess: Guess, fail: bool = False) -> None:
        self.guess = guess
        self.fail = fail
        self.table: dict[int, int] = {}
        self.ended: list[list[int]] = []
        self.scopes: dict[int, str | None] = {}

    def begin(self, key: int, prompt_token_ids: np.ndarray, scope: str | None) -> None:
        assert key not in self.table
        self.table[key] = len(prompt_token_ids)
        self.scopes[key] = scope

    def propose(self, key: int, token_ids: np.ndarray, max_drafts: int) -> list[int]:
        assert max_drafts >= 1
        assert self.table[key] == len(token_ids), "it was not told of every token"
        if self.fail:
            raise RuntimeError("the drafter broke")
        return self.guess(token_ids.tolist(), max_drafts)

    def observe(self, key: int, token_ids: np.ndarray, num_new: int) -> None:
        self.table[key] += num_new
        assert self.table[key] == len(token_ids)

    def finish(self, key: int, token_ids: np.ndarray) -> None:
        self.ended.append(token_ids.tolist())
        del self.table[key]


class FakeDraftHost:
    """A separate draft model over a guess, with its own KV in the same block ids."""

    def __init__(self, limits: EngineLimits, guess: Guess, short_every: int = 0) -> None:
        self.limits = limits
        self.kv = PagedTokens(limits)
        self.guess = guess
        self.short_every = short_every
        self.num_steps = 0
        self.fail_at: int | None = None
        self.num_fed = 0
        self.num_forwards = 0  # steps in which a model would run

    def absorb(self, plan: StepPlan, verified: Verified) -> None:
        return

    def propose(self, plan: StepPlan) -> Proposal:
        self.num_steps += 1
        if self.fail_at is not None and self.num_steps >= self.fail_at:
            raise RuntimeError("the draft model broke")
        self.kv.take_tables(plan)
        rows = {e.slot: e for e in plan.target}
        ids: list[int] = []
        counts: list[int] = []
        total = 0
        for entry in plan.draft:
            assert len(entry.token_ids) == entry.num_rows > 0 and entry.first == entry.start
            feed = entry.token_ids.tolist()
            total += len(feed)
            history = self.kv.read(entry.slot, entry.start)  # the draft_len contract
            self.kv.write(entry.slot, entry.start, feed)
            target = rows[entry.slot]
            assert entry.num_drafts == target.num_pending_drafts
            end = entry.start + len(feed)
            assert end <= target.start + len(target.token_ids), "fed past the step's tokens"
            if entry.num_drafts:
                assert end == target.start + len(target.token_ids), "drafts need the newest token"
                k = entry.num_drafts
                if self.short_every and len(history) % self.short_every == 0:
                    k -= 1
                drafts = self.guess(history + feed, k)
                self.kv.write(entry.slot, end, drafts[:-1])
                ids += drafts
                counts.append(k)
        assert total <= self.limits.max_num_batched_tokens
        self.num_fed += total
        self.num_forwards += bool(plan.draft)
        return Proposal(DraftTokens(plan.step, token_array(ids), token_array(counts)))


def draft_model_law(k: int) -> DraftLaw:
    return DraftLaw(
        arrives_in_step=True, keeps_kv=True, kv_survives_drafting=True, num_lookahead_tokens=k
    )


def make_limits(k: int = 0, **changes: object) -> EngineLimits:
    values: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 128,
        "block_size": 4,
        "num_blocks": 8 * 32 + 1,
        "vocab_size": VOCAB,
        "eos_token_ids": (EOS,),
        "num_speculative_tokens": k,
        "num_speculative_tokens_for_batch": lambda _n: k,
    }
    if changes.pop("has_draft_model", False):
        values["law"] = draft_model_law(k)
    values.update(changes)
    return EngineLimits(**values)  # type: ignore[arg-type]


def plain(
    script: Script, prompt: Sequence[int], max_tokens: int, eos: Sequence[int] = (EOS,)
) -> list[int]:
    """What a request must produce: one token at a time, shares no code with the engine."""
    tokens = list(prompt)
    out: list[int] = []
    while len(out) < max_tokens:
        out.append(script(tokens))
        tokens.append(out[-1])
        if out[-1] in eos:
            break
    return out


@dataclass
class Collected:
    """All runs of one request."""

    runs: list[RunOutput] = field(default_factory=list)

    def __call__(self, out: RunOutput) -> None:
        assert not self.is_finished, "output after the end"
        self.runs.append(out)

    @property
    def is_finished(self) -> bool:
        return bool(self.runs) and self.runs[-1].finish_reason is not None

    @property
    def token_ids(self) -> list[int]:
        return [t for run in self.runs for t in run.token_ids]

    @property
    def text(self) -> str:
        return "".join(run.text for run in self.runs)

    @property
    def last(self) -> RunOutput:
        return self.runs[-1]

    def check(self) -> None:
        """Tokens, flags and log-probabilities of one request agree."""
        assert self.last.num_output_tokens == len(self.token_ids)
        for run in self.runs:
            assert len(run.accepted) == len(run.token_ids)
            if run.logprobs is not None:
                assert [lp.token_id for lp in run.logprobs] == list(run.token_ids)


def request(rid: str, prompt: Sequence[int], **changes: object) -> GenerateRequest:
    values: dict[str, object] = {"temperature": 0.0, "max_tokens": 16}
    values.update(changes)
    return GenerateRequest(rid, list(prompt), **values)  # type: ignore[arg-type]


def run_all(
    engine: VerifierEngine, requests: Sequence[GenerateRequest], timeout_s: float = 20.0
) -> list[Collected]:
    """Add all requests at once and wait for their ends."""
    import threading

    done = threading.Semaphore(0)
    results = []
    for params in requests:
        collected = Collected()
        results.append(collected)

        def sink(out: RunOutput, collected: Collected = collected) -> None:
            collected(out)
            if out.finish_reason is not None:
                done.release()

        engine.add_request(params, sink)
    for _ in requests:
        assert done.acquire(timeout=timeout_s), f"no end: {engine.status()}"
    return results
