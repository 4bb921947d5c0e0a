"""A rank reads its own part of a checkpoint; what cannot be cut is refused with its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from actors.errors import LoadError
from actors.model.loader import load_causal_lm
from parallel.checkpoint import ShardReader
from parallel.experts import ExpertShare
from parallel.groups import SingleRank
from parallel.shard import empty_parameters, plan_shard
from parallel.topology import TopologyError
from tests.unit.parallel.test_shard import MOE

CPU = torch.device("cpu")


def empty(path: Path, **overrides: Any) -> Any:
    config = AutoConfig.from_pretrained(path)
    for key, value in overrides.items():
        setattr(config, key, value)
    with empty_parameters():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def stored_bytes(path: Path) -> int:
    total = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            for key in handle.keys():  # noqa: SIM118
                tensor = handle.get_tensor(key)
                total += tensor.numel() * tensor.element_size()
    return total


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("name", "overrides", "expert_parallel"),
    [
        ("llama", {}, False),
        ("qwen2", {"tie_word_embeddings": True}, False),
        ("mixtral", MOE, False),
        ("mixtral", MOE, True),
    ],
)
def test_bytes_read(
    family_dir: Callable[..., Path],
    name: str,
    overrides: dict[str, Any],
    expert_parallel: bool,
    size: int,
) -> None:
    """All ranks together read the file once, but for what each holds: norms, routers, shared
    KV heads."""
    path = family_dir(name, **overrides)
    stored, read = stored_bytes(path), 0
    for rank in range(size):
        model = empty(path)
        experts = ExpertShare(rank, size) if expert_parallel else None
        plan = plan_shard(model, rank, size, experts=experts)
        reader = ShardReader(path, model, torch.float32, CPU)
        tensors = [
            reader.read(key, plan.cuts.get(key)) for key in model.state_dict() if key in reader
        ]
        reader.close()
        assert reader.num_bytes_read == sum(t.numel() * t.element_size() for t in tensors)
        assert reader.num_bytes_read < stored * 1.2 / size
        read += reader.num_bytes_read
    assert stored <= read < stored * 1.2


def test_refusals_name_the_layer(family_dir: Callable[..., Path]) -> None:
    llama = family_dir("llama")
    with pytest.raises(TopologyError, match="intermediate_size=90 does not split over"):
        plan_shard(empty(llama, intermediate_size=90), 0, 4, experts=None)
    with pytest.raises(TopologyError, match=r"num_attention_heads=4 .* use one of \[1, 2, 4\]"):
        plan_shard(empty(llama), 0, 3, experts=None)
    with pytest.raises(TopologyError, match="remove enable_expert_parallel"):
        plan_shard(empty(llama), 0, 2, experts=ExpertShare(0, 2))

    fused = empty(family_dir("phi3"))
    fused.tp_plan = {**fused.tp_plan, "model.layers.*.self_attn.qkv_proj": "colwise"}
    with pytest.raises(TopologyError, match=r"layers\.0\.self_attn\.qkv_proj joins query, key"):
        plan_shard(fused, 0, 2, experts=None)

    other = empty(llama)
    other.tp_plan = {**other.tp_plan, "model.layers.*.self_attn.o_proj": "mla_kv_a_proj"}
    with pytest.raises(TopologyError, match=r"layers\.0\.self_attn\.o_proj .* 'mla_kv_a_proj'"):
        plan_shard(other, 0, 2, experts=None)

    other.tp_plan = {}
    with pytest.raises(TopologyError, match="names no layers in its tensor parallel plan"):
        plan_shard(other, 0, 2, experts=None)


def test_experts_without_a_plan_stay_whole_and_say_so(family_dir: Callable[..., Path]) -> None:
    model = empty(family_dir("mixtral", **MOE))
    model.tp_plan = {k: v for k, v in model.tp_plan.items() if "experts" not in k}
    plan = plan_shard(model, 0, 2, experts=None)
    assert plan.notes == [
        "model.layers.*.mlp.experts has no entry in the plan: every rank holds all experts"
    ]
    assert not any("experts" in name for name in plan.cuts)


class TwoRanks(SingleRank):
    """As rank 0 of 2, as far as loading goes."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2


FAULTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str]] = {
    "missing": (
        lambda w: {k: v for k, v in w.items() if k != "model.layers.1.mlp.up_proj.weight"},
        r"the checkpoint misses model\.layers\.1\.mlp\.up_proj\.weight \(the checkpoint is incom",
    ),
    "empty layers": (
        lambda w: {k: v for k, v in w.items() if "layers" not in k},
        r"misses 27 tensors: model\.layers\.0\.input_layernorm\.weight, .* and 19 more",
    ),
    "no head": (
        lambda w: {k: v for k, v in w.items() if "lm_head" not in k},
        r"misses lm_head\.weight \(if the head is the embedding, set tie_word_embeddings",
    ),
    "unexpected": (
        lambda w: {**w, "model.layers.3.mlp.up_proj.weight": torch.zeros(2)},
        r"has, unexpectedly, model\.layers\.3\.mlp\.up_proj\.weight",
    ),
    "shape": (
        lambda w: {**w, "model.norm.weight": torch.zeros(63)},
        r"has model\.norm\.weight \[63\] where \[64\] was expected",
    ),
    "prefix": (
        lambda w: {f"module.{k}": v for k, v in w.items()},
        r"misses 30 tensors: .*has, unexpectedly, 30 tensors: .*names begin with 'module\.', which",
    ),
}


def rewritten(
    source: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> str:
    to.mkdir(exist_ok=True)
    save_file(change(load_file(source / "model.safetensors")), to / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    (to / "config.json").write_text((source / "config.json").read_text())
    return str(to)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_are_not_the_models_are_listed(
    family_dir: Callable[..., Path], tmp_path: Path, fault: str, num_ranks: int
) -> None:
    change, message = FAULTS[fault]
    path = rewritten(family_dir("llama"), tmp_path / "model", change)
    group = TwoRanks() if num_ranks == 2 else None
    with pytest.raises(LoadError, match=message):
        load_causal_lm(path, dtype=torch.float32, device=CPU, group=group)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_a_model_does_without_is_no_fault(
    family_dir: Callable[..., Path], tmp_path: Path, num_ranks: int
) -> None:
    """A tied head, buffers of old checkpoints, and modules that predict further tokens."""
    group = TwoRanks() if num_ranks == 2 else None
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    source = family_dir("qwen2", tie_word_embeddings=True, num_nextn_predict_layers=1)
    extra |= {name: torch.zeros(64) for name in ("model.layers.3.enorm.weight", "mtp.fc.weight")}
    path = rewritten(source, tmp_path / "model", lambda w: {**w, **extra})
    assert "lm_head.weight" not in load_file(source / "model.safetensors")
    load_causal_lm(path, dtype=torch.float32, device=CPU, group=group)


def test_files_that_the_index_names_must_be_there(
    family_dir: Callable[..., Path], tmp_path: Path
) -> None:
    rewritten(family_dir("llama"), tmp_path, lambda weights: weights)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"not there: model-00002-of-00002\.safetensors; download"):
        load_causal_lm(str(tmp_path), dtype=torch.float32, device=CPU, group=TwoRanks())


def test_a_gguf_file_is_not_split(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(LoadError, match="a GGUF file is read whole"):
        load_causal_lm(str(gguf), dtype=torch.float32, device=CPU, group=TwoRanks())
