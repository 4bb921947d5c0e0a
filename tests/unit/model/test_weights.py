"""Weights by name: what transformers drops from a checkpoint, and what is wrong with one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.errors import LoadError
from actors.model.loader import load_causal_lm
from actors.model.weights import NamedWeights
from parallel.shard import Cut
from tests.unit.model.conftest import CPU

MTP = "model.layers.3."
SHAPES = {f"{MTP}enorm.weight": (64,), f"{MTP}eh_proj.weight": (64, 128)}


@pytest.fixture(scope="module")
def with_mtp(
    family_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A target of 3 layers whose checkpoint, in two files, has a fourth that its class ignores."""
    source, folder = family_dir("llama"), tmp_path_factory.mktemp("mtp")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    made = torch.Generator().manual_seed(0)
    extra = {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}
    extra[f"{MTP}steps"] = torch.tensor([7, 9])
    files = {
        "model-00001-of-00002.safetensors": load_file(source / "model.safetensors"),
        "model-00002-of-00002.safetensors": extra,
    }
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {name: file for file, tensors in files.items() for name in tensors},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder, extra


def reader(folder: Path, dtype: torch.dtype = torch.float32) -> NamedWeights:
    return NamedWeights(str(folder), dtype=dtype, device=CPU)


def test_layers_that_transformers_drops_are_read_by_name(
    with_mtp: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, extra = with_mtp
    loaded = load_causal_lm(str(folder), dtype=torch.float32, device=CPU)
    assert len(loaded.layers) == 3 and not any(
        name.startswith(MTP) for name in loaded.model.state_dict()
    )
    with reader(folder) as weights:
        assert f"{MTP}enorm.weight" in weights and f"{MTP}embed_tokens.weight" not in weights
        assert weights.under(MTP) == sorted(extra)
        steps = {f"{MTP}steps": (2,)}
        found = weights.read({**SHAPES, **steps}, whole=[MTP])
        rows = Cut(0, ((16, 32), (48, 64)))
        part = weights.read(SHAPES, cuts={f"{MTP}eh_proj.weight": rows})
    assert all(torch.equal(found[name], extra[name]) for name in extra)
    whole = extra[f"{MTP}eh_proj.weight"]
    assert torch.equal(part[f"{MTP}eh_proj.weight"], torch.cat([whole[16:32], whole[48:]]))
    with reader(folder, torch.bfloat16) as weights:
        found = weights.read({**SHAPES, **steps})
    assert found[f"{MTP}enorm.weight"].dtype == torch.bfloat16
    assert found[f"{MTP}steps"].dtype == torch.int64


def test_every_fault_is_listed(with_mtp: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = with_mtp
    wanted = {f"{MTP}enorm.weight": (65,), f"{MTP}hnorm.weight": (64,), "other": (1,)}
    message = (
        f"misses {MTP}hnorm.weight, other; has, unexpectedly, {MTP}eh_proj.weight; "
        f"has {MTP}enorm.weight [64] where [65] was expected"
    )
    with reader(folder) as weights, pytest.raises(LoadError, match=re.escape(message)):
        weights.read(wanted, whole=[MTP], ignored=[f"{MTP}steps"])
    with (
        reader(folder) as weights,
        pytest.raises(LoadError, match=r"unexpectedly, \d+ tensors: .* and 2[0-9] m"),
    ):
        weights.read(SHAPES, whole=[""])


def test_a_checkpoint_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(LoadError, match=r"holds pytorch_model\.bin but no \*\.safetensors"):
        reader(tmp_path)
