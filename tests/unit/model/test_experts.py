"""Mixture-of-experts layers: transformers' numbers, and rows whose bits are their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.model.conftest import Runner

MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 128,
    "intermediate_size": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    # Routes by sigmoid, with plain experts beside the routed ones.
    "glm4_moe": {
        "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_do_not_depend_on_company(family_dir: Callable[..., Path], name: str) -> None:
    path = family_dir(name, **{**MOE, **FAMILIES[name]})
    ids = np.random.default_rng(0).integers(3, 96, 60).tolist()
    whole = Runner(path)
    logits = whole.rows((0, 0, ids))
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = plain(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)
    assert whole.lm.is_batch_invariant
    slot = 1
    for cuts in ([1] * 8, [5] * 6, [17, 1, 40]):
        start = 0
        for size in cuts:
            got = whole.rows((slot, start, ids[start : start + size]))
            assert torch.equal(got, logits[start : start + size]), (cuts, start)
            start += size
