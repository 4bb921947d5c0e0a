"""Models of GGUF files have the weights, config and tokens that transformers gives them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.errors import LoadError
from actors.model.linear import Format, PackedLinear
from actors.model.loader import load_causal_lm
from actors.model.table import PackedTable
from actors.native import products
from actors.startup.tokenizer import open_tokenizer
from tests.unit.model.conftest import SHAPE, Runner

gguf: Any = pytest.importorskip("gguf")

CPU = torch.device("cpu")
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "F16", "BF16", "F32")
# Rows of 256 and more are there in these.
K_KINDS = ("Q6_K", "Q4_K", "Q5_K")


def write_gguf(
    path: Path,
    name: str = "llama",
    kinds: tuple[str, ...] = KINDS,
    extra: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A random model of GGUF architecture `name`, its matrices of block types in turn."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

    shape = {**SHAPE, "intermediate_size": 128, **changes}
    config = AutoConfig.for_model({"gemma3": "gemma3_text"}.get(name, name), **shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    made = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(12345.0)
    writer.add_rope_dimension_count(shape["head_dim"])
    if name == "gemma3":
        writer.add_sliding_window(24)
    writer.add_tokenizer_model("gpt2")
    vocab = config.vocab_size
    writer.add_token_list(["<s>", "</s>", *(chr(0x41 + n) for n in range(vocab - 3)), "AB"])
    writer.add_token_types([3, 3, *([1] * (vocab - 2))])
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    tied = config.tie_word_embeddings
    matrices = 0
    for called, ours in get_gguf_hf_weights_map(model, TensorProcessor()).items():
        if tied and called == "output.weight":
            continue
        values = made.standard_normal(model.state_dict()[ours].shape, np.float32)
        if values.ndim == 1:
            writer.add_tensor(called, values)
            continue
        kind = gguf.GGMLQuantizationType[kinds[matrices % len(kinds)]]
        matrices += 1
        if kind.name in K_KINDS:  # gguf-py can read these only: any bits, and tame scales
            inputs, size = gguf.GGML_QUANT_SIZES[kind]
            rows = made.integers(0, 256, (*values.shape[:-1], values.shape[-1] // inputs, size))
            rows = rows.astype(np.uint8)
            for at in (208,) if kind.name == "Q6_K" else (0, 2):
                rows[..., at : at + 2] = np.full(1, 1e-3, np.float16).view(np.uint8)
            rows = rows.reshape(*values.shape[:-1], -1)
        else:
            rows = gguf.quantize(values, kind)
        writer.add_tensor(called, rows, raw_dtype=kind)
    for called, values in (extra or {}).items():
        writer.add_tensor(called, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)


def weights(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], set[str]]:
    """All weights, as plain ones, and the names of the formats that some are kept in."""
    found, formats = dict(model.state_dict()), set()
    for name, module in model.named_modules():
        if isinstance(module, (PackedLinear, PackedTable)):
            num_rows, width = module.weight.shape
            found[f"{name}.weight"] = torch.ops.paceline.packed_rows(
                torch.arange(num_rows), module.panels, num_rows, width, module.format
            )
            formats.add(Format(module.format).name)
            if getattr(module, "bias", None) is not None:
                found[f"{name}.bias"] = module.bias
    return found, formats


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_causal_lm(str(path), dtype=dtype, device=CPU).model


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"tie_word_embeddings": False}),  # whose converter turns rows of q and k round
        ("qwen2", {"tie_word_embeddings": True}),  # biases
        ("qwen3", {"tie_word_embeddings": False, "head_dim": 128}),  # all that transformers takes
        ("gemma3", {"tie_word_embeddings": True}),  # norms less one, a table that is scaled
    ],
)
def test_weights_and_config_are_those_of_transformers(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", name, **changes)
    ours, theirs = load(path), reference(path)
    found, formats = weights(ours)
    wanted = theirs.state_dict()
    assert found.keys() == wanted.keys()
    for called, weight in wanted.items():
        assert torch.equal(found[called], weight), called
    if products.load() is not None:
        assert formats == set(KINDS) - {"F32"}
    for side in (ours, theirs):
        for key in ("_name_or_path", "quantization_config", "_attn_implementation"):
            vars(side.config).pop(key, None)
    assert ours.config.to_dict() == theirs.config.to_dict()
    # What no file holds is made: frequencies of the rotary embedding.
    ours_made, theirs_made = dict(ours.named_buffers()), dict(theirs.named_buffers())
    assert all(torch.equal(ours_made[called], theirs_made[called]) for called in theirs_made)


def test_blocks_of_256(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", kinds=K_KINDS, hidden_size=256, intermediate_size=256, head_dim=64
    )
    found, formats = weights(load(path))
    assert all(torch.equal(found[name], w) for name, w in reference(path).state_dict().items())
    assert products.load() is None or formats == set(K_KINDS)


def test_without_the_kernel_weights_are_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    wanted = reference(path, torch.bfloat16).state_dict()
    half = load(path, torch.bfloat16).state_dict()
    assert all(torch.equal(half[name], w) for name, w in wanted.items())
    monkeypatch.setattr(products, "load", lambda: None)
    found, formats = weights(load(path))
    assert all(torch.equal(found[name], w) for name, w in reference(path).state_dict().items())
    assert not formats


@pytest.mark.skipif(products.load() is None, reason="no C compiler")
@pytest.mark.parametrize("compile_layers", ["off", "on"])
def test_logits_are_those_of_the_dequantised_model(tmp_path: Path, compile_layers: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", kinds=("Q4_1", "Q4_1", "Q8_0"))
    plain = tmp_path / "plain"
    model = reference(path)
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(plain)
    ids = [5, 17, 80, 2, 33, 9, 61]
    of_blocks = Runner(path, compile_layers=compile_layers).rows((0, 0, ids))
    of_plain = Runner(plain, compile_layers=compile_layers).rows((0, 0, ids))
    assert torch.equal(of_blocks, of_plain)


def test_a_tokenizer_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    path = str(write_gguf(tmp_path / "m.gguf"))
    first = open_tokenizer(path)

    def fail(*args: object, **options: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr("actors.startup.tokenizer._ask_auto_tokenizer", fail)
    again = open_tokenizer(path)
    assert again.backend_tokenizer.to_str() == first.backend_tokenizer.to_str()
    assert again.special_tokens_map == first.special_tokens_map


def test_tensors_beside_the_models(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Llama 3.1 has factors of its frequencies in one; others are named, not lost in silence."""
    factors = np.linspace(1, 8, SHAPE["head_dim"] // 2, dtype=np.float32)
    plain = load(write_gguf(tmp_path / "plain.gguf"))
    extra = {"rope_freqs.weight": factors, "blk.0.nextn.eh_proj.weight": np.zeros(32, np.float32)}
    ours = load(write_gguf(tmp_path / "m.gguf", extra=extra))
    wanted = plain.model.rotary_emb.inv_freq / torch.from_numpy(factors)
    assert torch.equal(ours.model.rotary_emb.inv_freq, wanted)
    assert "1 tensors are not used" in caplog.text and "nextn.eh_proj" in caplog.text
    with pytest.raises(LoadError, match=r"rope_freqs\.weight has shape \[3\]"):
        load(write_gguf(tmp_path / "x.gguf", extra={"rope_freqs.weight": factors[:3]}))


def rewritten(path: Path, change: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


def test_what_is_wrong_with_a_file_is_told(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    with pytest.raises(LoadError, match=r"is cut off: .* download it again"):
        load(rewritten(path, lambda data: data[:-5000]))
    with pytest.raises(LoadError, match=r"misses model\.norm\.weight"):
        load(rewritten(path, lambda _: whole.replace(b"output_norm.weight", b"output_nork.weight")))
    with pytest.raises(LoadError, match="architecture lxama is not supported"):
        load(
            rewritten(
                path,
                lambda _: whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lxama"),
            )
        )
