"""The paged forward equals transformers' plain one; a row's bits do not depend on company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.errors import LoadError
from actors.model import compiled as compiling
from actors.model.inputs import SlotTables
from actors.model.loader import decoder_of
from actors.model.taps import TapSpec
from tests.unit.model.conftest import Runner

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "gemma3_text": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
    },
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "olmo2": {},
    "granite": {"logits_scaling": 2.0},
    "phi3": {},
    "gpt_neox": {"rotary_pct": 0.25},
    # Its window is in the mask alone.
    "phimoe": {"sliding_window": 24, "num_local_experts": 8, "num_experts_per_tok": 2},
    # Layers differ in what they cache.
    "gemma4_text": {
        "sliding_window": 24, "hidden_size_per_layer_input": 0, "global_head_dim": 32,
    },
    # Attention sinks, and experts that are not packed: rows depend on their company there.
    "gpt_oss": {"sliding_window": 24, "num_local_experts": 8, "num_experts_per_tok": 2},
}  # fmt: skip


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 96, length).tolist()


def final_norm(plain: Any) -> torch.nn.Module:
    decoder = decoder_of(plain)
    return decoder.norm if hasattr(decoder, "norm") else decoder.final_layer_norm


@pytest.mark.parametrize("name", FAMILIES)
def test_against_transformers_and_bitwise(family_dir: Callable[..., Path], name: str) -> None:
    path = family_dir(name, **FAMILIES[name])
    ids, other = prompt(90), prompt(50, seed=5)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    # Every stream: those that enter a layer, and the one that enters the final norm.
    num_layers = plain.config.num_hidden_layers
    taps = TapSpec(last=True, aux=tuple(range(num_layers + 1)))
    runner = Runner(path, taps=taps)
    whole, states = runner.forward((0, 0, ids))
    with torch.inference_mode():
        reference = plain(torch.tensor([ids]), output_hidden_states=True)
        expected = reference.logits[0]
        head, embedded = runner.lm.head(states.last), runner.lm.embed(torch.tensor(ids))
    torch.testing.assert_close(whole, expected, atol=2e-4, rtol=1e-4)
    for i in range(num_layers):
        torch.testing.assert_close(
            states.aux[i], reference.hidden_states[i][0], atol=2e-4, rtol=1e-4
        )
    torch.testing.assert_close(states.last, reference.hidden_states[-1][0], atol=2e-4, rtol=1e-4)
    with torch.inference_mode():
        normed = final_norm(plain)(states.aux[num_layers])
        assert torch.equal(embedded, plain.get_input_embeddings()(torch.tensor(ids)))
    torch.testing.assert_close(normed, states.last, atol=1e-5, rtol=1e-5)
    assert torch.equal(head, whole)
    assert runner.lm.is_batch_invariant == (name != "gpt_oss")

    def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        if name == "gpt_oss":
            return torch.allclose(ours, theirs, atol=1e-5)
        return torch.equal(ours, theirs)

    for cuts in ([1] * 6, [5, 3], [17, 1, 40], [89]):
        fresh, start = Runner(path, taps=taps), 0
        for size in cuts:
            got, at = fresh.forward((0, start, ids[start : start + size]))
            rows = slice(start, start + size)
            assert same(got, whole[rows]), (name, cuts, start)
            assert same(at.last, states.last[rows])
            assert all(same(at.aux[i], states.aux[i][rows]) for i in taps.aux)
            start += size

    # The last rows again, as verify rows beside a prompt chunk and another request's decode row.
    fresh = Runner(path)
    fresh.rows((0, 0, ids[:85]), (1, 0, other[:30]))
    mixed = fresh.rows((2, 0, other[:20]), (0, 85, ids[85:]), (1, 30, other[30:31]))
    assert same(mixed[20:25], whole[85:])


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 12, 16, 24, 32, 48])
def test_block_size_and_chunks_change_nothing_visible(
    family_dir: Callable[..., Path], block_size: int
) -> None:
    path, ids = family_dir("llama"), prompt(70)
    runner = Runner(path, block_size=block_size)
    assert runner.lm.is_batch_invariant
    logits = runner.rows((0, 0, ids))
    torch.testing.assert_close(logits, Runner(path).rows((0, 0, ids)), atol=1e-5, rtol=1e-5)
    for chunk in (1, 4, 33):
        parts = [(1, at, ids[at : at + chunk]) for at in range(0, len(ids), chunk)]
        assert torch.equal(torch.cat([runner.rows(part) for part in parts]), logits)


# phimoe routes, gemma4's layers hand each other a dictionary, gpt_oss has experts of another kind.
COMPILED = [name for name in FAMILIES if name not in ("phimoe", "gemma4_text", "gpt_oss")]


@pytest.mark.parametrize("name", [*COMPILED, "opt", "starcoder2", "gemma", "olmo"])
def test_compiled_layers_equal_eager_and_keep_their_bits(
    family_dir: Callable[..., Path], name: str
) -> None:
    path, ids = family_dir(name, **FAMILIES.get(name, {})), prompt(60)
    eager = Runner(path).rows((0, 0, ids))
    compiled = Runner(path, compile_layers="on")
    assert compiled.lm.compiled
    whole = compiled.rows((0, 0, ids))
    torch.testing.assert_close(whole, eager, atol=1e-5, rtol=1e-4)
    for size in (1, 2, 5):
        again = compiled.rows((1, 0, ids[:40]))
        assert torch.equal(again, whole[:40])
        assert torch.equal(compiled.rows((1, 40, ids[40 : 40 + size])), whole[40 : 40 + size])


def test_layers_that_cannot_be_compiled_run_eagerly(
    family_dir: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """gemma4's layers hand each other a dictionary."""
    path, ids = family_dir("gemma4_text", **FAMILIES["gemma4_text"]), prompt(40)
    with pytest.raises(LoadError, match="compile_layers: on cannot be had for Gemma4Text"):
        Runner(path, compile_layers="on").rows((0, 0, ids))
    monkeypatch.setattr(compiling, "_MIN_PARAMETERS", 0)
    runner = Runner(path, compile_layers="auto")
    assert torch.equal(runner.rows((0, 0, ids)), Runner(path).rows((0, 0, ids)))
    assert not runner.lm.compiled and "layers run eagerly: Gemma4Text" in caplog.text


def test_no_logits_rows_still_writes_kv(family_dir: Callable[..., Path]) -> None:
    from actors.model.inputs import EntryRows
    from actors.steps.messages import token_array

    path, ids = family_dir("llama"), prompt(20)
    runner = Runner(path)
    batch = runner.tables.flatten([EntryRows(0, 0, token_array(ids[:19]), 0)], torch.device("cpu"))
    assert runner.lm.forward(batch).logits.shape == (0, 96)
    assert torch.equal(runner.rows((0, 19, ids[19:])), Runner(path).rows((0, 0, ids))[19:])


def test_bfloat16_runs_on_the_torch_path(family_dir: Callable[..., Path]) -> None:
    from actors.model.inputs import EntryRows, SlotTables
    from actors.model.paged_lm import PagedCausalLM
    from actors.steps.messages import BlockDelta, SlotParams, token_array
    from specconfig import EngineArgs

    path, ids = family_dir("llama"), prompt(40)
    config = EngineArgs(model=str(path), dtype="bfloat16", max_model_len=100).resolve().model
    lm = PagedCausalLM(config, device=torch.device("cpu"), max_positions=100)
    lm.allocate(10, 16)
    assert not lm.is_batch_invariant
    tables = SlotTables(1, 100, 0, 16)
    tables.apply([SlotParams(0, 1, 0)], [BlockDelta(0, 0, token_array(range(1, 8)))])
    first = lm.forward(
        tables.flatten([EntryRows(0, 0, token_array(ids[:35]), 35)], lm.device)
    ).logits
    rest = lm.forward(
        tables.flatten([EntryRows(0, 35, token_array(ids[35:]), 5)], lm.device)
    ).logits
    exact = Runner(path).rows((0, 0, ids))
    torch.testing.assert_close(torch.cat([first, rest]), exact, atol=0.15, rtol=0.1)


def test_warm_up_notices_rows_that_depend_on_their_company(
    family_dir: Callable[..., Path],
) -> None:
    for is_broken in (False, True):
        runner = Runner(family_dir("llama"))
        if is_broken:
            head = runner.lm.model.lm_head
            plain = head.forward
            head.forward = lambda x, plain=plain: plain(x) + 1e-6 * x.shape[1]
        runner.lm.warm_up(SlotTables(2, 400, 0, 16), 3)
        assert runner.lm.is_batch_invariant != is_broken


def test_what_is_cached_is_counted_by_shape(family_dir: Callable[..., Path]) -> None:
    assert Runner(family_dir("llama")).lm.kv.shapes == ((3, 2, 16),)
    lm = Runner(family_dir("gemma4_text", **FAMILIES["gemma4_text"])).lm
    stored = sum(cache.num_bytes for cache in lm.kv.caches) // lm.kv.caches[0].keys.shape[0]
    assert len(lm.kv.shapes) == 2
    assert 2 * sum(n * h * d for n, h, d in lm.kv.shapes) * 4 * 16 == stored
