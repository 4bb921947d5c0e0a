"""What cannot be served is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from actors.errors import LoadError
from actors.model.loader import load_causal_lm, override, torch_dtype

CPU = torch.device("cpu")


def load(location: object) -> None:
    load_causal_lm(str(location), dtype=torch.float32, device=CPU)


def test_recurrent_layers_are_refused_by_type(family_dir: Callable[..., Path]) -> None:
    path = family_dir("lfm2", layer_types=["conv", "full_attention", "conv"])
    with pytest.raises(LoadError, match=r"layer 0, Lfm2DecoderLayer \(conv\).*rolled back"):
        load(path)


LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("deepseek_v3", LATENT, "keys of 24 and values of 16 dimensions"),
        (
            "llama4_text",
            {"attention_chunk_size": 8, "num_local_experts": 8, "num_experts_per_tok": 1},
            "mask is neither causal nor a sliding window",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "mask is neither causal nor"),
        ("doge", {"sliding_window": 16}, "mask is neither causal nor a sliding window"),
        ("stablelm", {}, "attention does not receive what the model is called with"),
        ("diffllama", {}, "a layer attends twice"),
    ],
)
def test_attention_of_other_kinds_is_refused(
    family_dir: Callable[..., Path], name: str, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(LoadError, match=words):
        load(family_dir(name, **changes))


def test_missing_paths() -> None:
    with pytest.raises(LoadError, match="/no/such/dir does not exist"):
        load("/no/such/dir")
    with pytest.raises(LoadError, match=r"GGUF file .*x\.gguf does not exist"):
        load("/no/such/x.gguf")


def test_overrides_of_a_gguf_file_are_not_swallowed(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(LoadError, match=r"hf_overrides=.*do not reach a GGUF file"):
        load_causal_lm(
            str(tmp_path / "m.gguf"), dtype=torch.float32, device=CPU, hf_overrides={"a": 1}
        )


def test_overrides_change_what_they_name_and_leave_the_rest(
    family_dir: Callable[..., Path],
) -> None:
    path = family_dir("llama", rope_parameters={"rope_type": "default", "rope_theta": 1234.0})
    changes = {"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "attention_dropout": 0.5}
    config = load_causal_lm(
        str(path), dtype=torch.float32, device=CPU, hf_overrides=changes
    ).model.config
    assert config.rope_parameters == {
        "rope_type": "linear", "rope_theta": 1234.0, "factor": 4.0,
    }  # fmt: skip
    assert config.attention_dropout == 0.5 and config.vocab_size == 96


def test_overrides_reach_into_a_nested_config() -> None:
    config = AutoConfig.for_model("gemma3")
    width = config.text_config.hidden_size
    override(config, {"text_config": {"sliding_window": 77, "rope_parameters": {"extra": 1}}})
    assert config.text_config.sliding_window == 77 and config.text_config.hidden_size == width
    rope = config.text_config.rope_parameters
    assert rope["extra"] == 1 and len(rope) > 1


def test_pickled_weights_are_not_loaded(family_dir: Callable[..., Path], tmp_path: Path) -> None:
    config = (family_dir("llama") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(LoadError, match=r"pytorch_model\.bin but no \*\.safetensors"):
        load(tmp_path)


def test_quantised_checkpoint(family_dir: Callable[..., Path], tmp_path: Path) -> None:
    source = family_dir("llama")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    with pytest.raises(LoadError, match="quantised \\(gptq\\)"):
        load(tmp_path)


def test_encoder_decoder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5"]}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(LoadError, match="cannot load"):
        load(tmp_path)


def test_dtype_names() -> None:
    assert torch_dtype("auto", CPU, "bfloat16") is torch.float32
    assert torch_dtype("auto", torch.device("cuda"), "bfloat16") is torch.bfloat16
    with pytest.raises(LoadError, match="float64"):
        torch_dtype("float64", CPU, "float32")
