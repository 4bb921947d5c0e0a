"""Model facts from a GGUF header, under Hugging Face names. Tensor data is never touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specconfig.errors import FactsUnavailable, FormatError

_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}


def read_gguf_facts(path: Path) -> dict[str, Any]:
    """Config dict of a GGUF file.

    Raises:
        FactsUnavailable: the file is not GGUF, or the reader package is missing.
        FormatError: an architecture we cannot map.
    """
    try:
        # Imported here: only GGUF users need the reader (and its numpy).
        from gguf import GGUFReader
    except ImportError as error:
        raise FactsUnavailable(
            "model",
            str(path),
            "a directory with config.json, or the 'gguf' package installed",
            "install gguf",
        ) from error
    try:
        reader = GGUFReader(str(path))
    except (ValueError, OSError, IndexError) as error:
        raise FactsUnavailable(
            "model", str(path), "a readable GGUF file", f"download it again ({error})"
        ) from error

    def value(name: str) -> Any:
        field = reader.get_field(name)
        return None if field is None else field.contents()

    name = value("general.architecture")
    if name not in _ARCHITECTURES:
        raise FormatError(
            "general.architecture",
            name,
            f"one of {sorted(_ARCHITECTURES)}",
            "use the original Hugging Face checkpoint",
        )
    model_type, architecture = _ARCHITECTURES[name]
    facts: dict[str, Any] = {"model_type": model_type, "architectures": [architecture]}
    for source, key in _KEYS.items():
        found = value(f"{name}.{source}")
        if found is not None:
            facts[key] = found
    if "vocab_size" not in facts:
        tokens = reader.get_field("tokenizer.ggml.tokens")
        if tokens is not None:
            facts["vocab_size"] = len(tokens.data)
    if "head_dim" not in facts and facts.get("num_attention_heads"):
        # GGUF's own default; the class default of an HF type may be another.
        facts["head_dim"] = facts["hidden_size"] // facts["num_attention_heads"]
    for role in ("bos", "eos"):
        found = value(f"tokenizer.ggml.{role}_token_id")
        if found is not None:
            facts[f"{role}_token_id"] = int(found)
    scaling = value(f"{name}.rope.scaling.type")
    if scaling not in (None, "none"):
        facts["rope_scaling"] = {
            "rope_type": scaling,
            "factor": value(f"{name}.rope.scaling.factor") or 1.0,
            "original_max_position_embeddings": value(
                f"{name}.rope.scaling.original_context_length"
            ),
        }
    facts["quantization_config"] = {"quant_method": "gguf"}
    facts["dtype"] = "float16"
    return facts
