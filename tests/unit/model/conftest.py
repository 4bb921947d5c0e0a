from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.model.inputs import EntryRows, SlotTables
from actors.model.paged_lm import PagedCausalLM
from actors.model.taps import TapSpec
from actors.model.trunk import Output
from actors.steps.messages import BlockDelta, SlotParams, token_array
from specconfig import EngineArgs

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_family(directory: Path, name: str, **overrides: Any) -> Path:
    """A random checkpoint of transformers' model type `name`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **{**SHAPE, **overrides})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    # Init is nearly symmetric; spread the weights so that layers matter.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    return directory


class Runner:
    """A paged model with one request's block table, fed by position ranges."""

    def __init__(
        self,
        path: Path,
        *,
        block_size: int = 16,
        compile_layers: str = "off",
        taps: TapSpec | None = None,
    ) -> None:
        args = EngineArgs(
            model=str(path), dtype="float32", max_model_len=400, block_size=block_size
        )
        self.config = args.resolve().model
        self.lm = PagedCausalLM(
            self.config,
            device=CPU,
            max_positions=401,
            compile_layers=compile_layers,  # type: ignore[arg-type]
            taps=taps,
        )
        self.lm.allocate(3 * (400 // block_size + 2), block_size)
        self.tables = SlotTables(3, 400, 0, block_size)
        per_request = -(-400 // block_size)
        rng = np.random.default_rng(1)
        ids = rng.permutation(np.arange(1, 1 + 3 * per_request))  # scattered, as after a while
        for slot in range(3):
            blocks = ids[slot * per_request : (slot + 1) * per_request]
            self.tables.apply([SlotParams(slot, 1, 0)], [BlockDelta(slot, 0, token_array(blocks))])

    def rows(self, *parts: tuple[int, int, list[int]]) -> torch.Tensor:
        """Logits of all rows of (slot, start, ids) parts, run in one forward."""
        return self.forward(*parts).logits

    @torch.inference_mode()
    def forward(self, *parts: tuple[int, int, list[int]]) -> Output:
        entries = [EntryRows(s, p, token_array(ids), len(ids)) for s, p, ids in parts]
        return self.lm.forward(self.tables.flatten(entries, CPU))


@pytest.fixture(scope="session")
def family_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def get(name: str, **overrides: Any) -> Path:
        key = f"{name}-{sorted(overrides.items())}"
        if key not in made:
            made[key] = write_family(tmp_path_factory.mktemp(name), name, **overrides)
        return made[key]

    return get
