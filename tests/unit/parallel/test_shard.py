"""A sharded model is the whole model: logits of TP 2 and 4 against transformers' plain forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from parallel.experts import ExpertShare
from parallel.groups import TPGroup
from tests.unit.model.toy_head import expected_logits
from tests.unit.parallel.conftest import Ranks

MOE = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "intermediate_size": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 97, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma3_text": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
    },
    "phi3": {},
    "olmo2": {},
    "mixtral": MOE,
    "qwen3_moe": {**MOE, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 64},
    # Query, key and value joined head by head.
    "gpt_neox": {"num_key_value_heads": 4, "rotary_pct": 0.25},
    # Plain experts beside the routed ones; those alone are stacked.
    "glm4_moe": {
        **MOE, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 96, length).tolist()


def rank_logits(group: TPGroup, path: str, ids: list[int], expert_parallel: bool) -> dict[str, Any]:
    """All ranks' logits side by side: of one chunk, and token by token; states; and logits of a
    draft that uses the target's embedding and head, both split."""
    from actors.model.inputs import EntryRows, SlotTables
    from actors.model.paged_lm import PagedCausalLM
    from actors.model.taps import TapSpec
    from actors.steps.messages import BlockDelta, SlotParams, token_array
    from specconfig import EngineArgs
    from tests.unit.model.toy_head import served_logits

    args = EngineArgs(model=path, dtype="float32", max_model_len=200)
    lm = PagedCausalLM(
        args.resolve().model,
        device=torch.device("cpu"),
        max_positions=201,
        group=group,
        experts=ExpertShare.of(group) if expert_parallel else None,
        taps=TapSpec(last=True, aux=(1, 3)),
    )
    lm.allocate(40, 16)
    states: list[Any] = []

    tables = SlotTables(1, 200, 0, 16)
    tables.apply([SlotParams(0, 1, 0)], [BlockDelta(0, 0, token_array(range(1, 13)))])

    def rows(cuts: list[int]) -> torch.Tensor:
        out, start = [], 0
        for size in cuts:
            entry = EntryRows(0, start, token_array(ids[start : start + size]), size)
            logits, taps = lm.forward(tables.flatten([entry], lm.device))
            assert taps is not None and taps.last is not None
            out.append(logits)
            states.append(torch.stack([taps.aux[1], taps.aux[3], taps.last]))
            start += size
        return torch.cat(out)

    whole, stepped = rows([len(ids)]), rows([20, 1, 1, 5, 3])
    begin, end = lm.vocab
    assert whole.shape[1] == end - begin
    return {
        "whole": whole,
        "stepped": stepped,
        "states": states[0],
        "stepped_states": torch.cat(states[1:], 1),
        "draft": served_logits(lm, tables, 0, ids, [20, 1, 8]),
        "kv_heads": lm.kv.caches[0].keys.shape[1],
        "parameters": lm.num_parameters,
        "calls": dict(group.num_calls),
    }


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_against_transformers(
    ranks: Ranks, family_dir: Callable[..., Path], name: str, size: int
) -> None:
    # Widths stay multiples of two vectors on each rank: torch's vectorised activations treat the
    # odd elements at a buffer's end differently, and where that is depends on the number of rows.
    path = family_dir(name, **{"intermediate_size": 128, **FAMILIES[name]})
    ids = prompt(30)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        out = plain(torch.tensor([ids]), output_hidden_states=True)
    expected, hidden = out.logits[0], torch.cat(out.hidden_states)
    drafted = expected_logits(plain, ids)
    whole_size = sum(p.numel() for p in plain.parameters())
    is_moe = "num_experts" in FAMILIES[name]
    for expert_parallel in (False, True) if is_moe else (False,):
        found = ranks.run(size, rank_logits, str(path), ids, expert_parallel)
        whole = torch.cat([f["whole"] for f in found], -1)
        torch.testing.assert_close(whole, expected, atol=3e-4, rtol=1e-4)
        assert found[0]["parameters"] < whole_size * (0.75 if size == 2 else 0.6)
        assert all(f["calls"] == found[0]["calls"] for f in found)
        stepped = torch.cat([f["stepped"] for f in found], -1)
        assert torch.equal(stepped, whole), (stepped - whole).abs().max()
        # Whole on each rank, and the same there.
        for part in found:
            assert torch.equal(part["states"], found[0]["states"])
            assert torch.equal(part["stepped_states"], part["states"])
        torch.testing.assert_close(found[0]["states"][[0, 2]], hidden[[1, 3]], atol=3e-4, rtol=1e-4)
        draft = torch.cat([f["draft"] for f in found], -1)
        torch.testing.assert_close(draft, drafted, atol=3e-4, rtol=1e-4)
    kv_heads = AutoConfig.from_pretrained(path).num_key_value_heads
    gathers = name in ("phi3", "olmo2")
    assert found[0]["kv_heads"] == (kv_heads if gathers else max(1, kv_heads // size))


def test_a_plan_for_experts_alone(ranks: Ranks, family_dir: Callable[..., Path]) -> None:
    """gpt-oss has no other: attention, sinks included, is whole on every rank."""
    path, ids = family_dir("gpt_oss", **MOE, sliding_window=24), prompt(30)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = plain(torch.tensor([ids])).logits[0]
    found = ranks.run(2, rank_logits, str(path), ids, True)
    for rows in ("whole", "stepped"):
        logits = torch.cat([f[rows] for f in found], -1)
        torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)
    assert found[0]["kv_heads"] == plain.config.num_key_value_heads
    refused = ranks.outcomes(2, rank_logits, str(path), ids, False)
    assert all(not is_fine and "names no layers in its tensor" in text for is_fine, text in refused)
