"""What cannot be served is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.errors import LoadError
from actors.model.loader import load_causal_lm, torch_dtype

CPU = torch.device("cpu")


def load(location: object) -> None:
    load_causal_lm(str(location), dtype=torch.float32, device=CPU)


def test_recurrent_layers_are_refused_by_type(family_dir: Callable[..., Path]) -> None:
    path = family_dir("lfm2", layer_types=["conv", "full_attention", "conv"])
    with pytest.raises(LoadError, match=r"layer 0, Lfm2DecoderLayer \(conv\).*rolled back"):
        load(path)


def test_missing_paths() -> None:
    with pytest.raises(LoadError, match="/no/such/dir does not exist"):
        load("/no/such/dir")
    with pytest.raises(LoadError, match=r"GGUF file .*x\.gguf does not exist"):
        load("/no/such/x.gguf")


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
