"""From a checkpoint's config dict to a ``ModelConfig``."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from specconfig.errors import ConfigError, FormatError
from specconfig.facts.source import GENERATION_KEY
from specconfig.model import DType, ModelConfig, text_section

HfTransform = Callable[[dict[str, Any]], Mapping[str, Any]]
"""A function from config to config."""

_LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length",
    "model_max_length", "max_sequence_length", "max_seq_length",
)  # fmt: skip
_EXPERT_KEYS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
)  # fmt: skip
CLASS_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
    "qwen2": {
        "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    },
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
        "max_position_embeddings": 32768,
    },
    "gemma3_text": {
        "vocab_size": 262208, "hidden_size": 2304, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131072,
    },
}  # fmt: skip
"""Values that a config.json of these types may leave out, because only differences are written.
A test compares them with transformers."""
_DTYPES = {"float32", "bfloat16", "float16"}


def full_text(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Language part with the class defaults filled in; always a copy."""
    text = text_section(hf)
    given = {key: value for key, value in text.items() if value is not None}
    return {**text, **CLASS_DEFAULTS.get(str(text.get("model_type")), {}), **given}


def rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE settings under either name (`rope_parameters`, older `rope_scaling`)."""
    text = text_section(hf)
    found = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return dict(found) if isinstance(found, Mapping) else {}


def rope_types(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Every RoPE type in use: one, or one per layer type when parameters are nested."""
    params = rope_parameters(hf)
    nested = [value for value in params.values() if isinstance(value, Mapping)]
    sections = nested if nested and len(nested) == len(params) else [params]
    return tuple(
        str(section.get("rope_type") or section.get("type") or "default") for section in sections
    )


def declared_length(hf: Mapping[str, Any]) -> int | None:
    """Longest sequence the checkpoint declares, in tokens; None when it says nothing."""
    text = full_text(hf)
    lengths = [int(text[key]) for key in _LENGTH_KEYS if text.get(key)]
    if not lengths:
        return None
    length = min(lengths)
    params = rope_parameters(hf)
    kinds = rope_types(hf)
    if len(kinds) == 1 and "yarn" in kinds[0]:
        original = params.get("original_max_position_embeddings")
        if original:
            length = max(length, int(original * float(params.get("factor", 1.0))))
    elif len(kinds) == 1 and kinds[0] in ("linear", "dynamic") and params.get("factor"):
        length = int(length * float(params["factor"]))
    return length


def is_moe(hf: Mapping[str, Any]) -> bool:
    """Whether the config declares more than one routed expert."""
    return bool(expert_counts(hf))


def expert_counts(hf: Mapping[str, Any]) -> list[int]:
    """Numbers of routed experts that the config declares, per layer where they differ; none or one
    expert does not count."""
    text = text_section(hf)
    found: set[int] = set()
    for key in _EXPERT_KEYS:
        value = text.get(key)
        counts = value if isinstance(value, (list, tuple)) else [value]
        found.update(count for count in counts if isinstance(count, int) and count > 1)
    return sorted(found)


def _ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(int(item) for item in value)
    return (int(cast(int, value)),)


def config_ends(
    hf: Mapping[str, Any], text: Mapping[str, Any], generation: Mapping[str, Any]
) -> dict[int, str]:
    """Ids that end an answer as the model's own configs say, and which of them says so."""
    found: dict[int, str] = {}
    own = "GGUF header" if quantization_method(hf) == "gguf" else "config.json"
    for section, name in ((generation, "generation_config.json"), (hf, own), (text, own)):
        for index in _ids(section.get("eos_token_id")):
            found.setdefault(index, name)
    return found


def _required(text: Mapping[str, Any], key: str, field: str, model: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FormatError(
            f"{field}: config.json[{key!r}]",
            value,
            "a positive integer",
            f"point {field} at a checkpoint whose config.json has {key!r} ({model})",
        )
    return value


def quantization_method(hf: Mapping[str, Any]) -> str | None:
    """Quantisation scheme the checkpoint declares."""
    section = hf.get("quantization_config") or text_section(hf).get("quantization_config")
    if isinstance(section, Mapping) and section.get("quant_method"):
        return str(section["quant_method"])
    return None


def checkpoint_dtype(hf: Mapping[str, Any]) -> str:
    """dtype of the stored weights; float32 when the config does not say (the HF default)."""
    text = text_section(hf)
    found = hf.get("dtype") or hf.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    name = str(found or "float32").removeprefix("torch.")
    return name if name in _DTYPES else "float32"


def merge_overrides(hf: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Apply dict overrides in place; nested mappings merge, everything else replaces."""
    for key, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(hf.get(key), dict):
            merge_overrides(hf[key], value)
        else:
            hf[key] = value


def apply_transform(hf: dict[str, Any], transform: HfTransform) -> dict[str, Any]:
    """Let ``transform`` rewrite a config in place, and return what it changed as nested overrides.

    The function itself cannot travel to the processes that load the weights; its effect can.

    Raises:
        ConfigError: it removed keys, or put in something that is not JSON.
    """
    generation = hf.pop(GENERATION_KEY, None)
    after = dict(transform(copy.deepcopy(hf)))
    overrides, removed = _difference(hf, after, "")
    if removed:
        raise ConfigError(
            "hf_overrides",
            removed,
            "a function that keeps every key",
            "set a key to None where it shall not apply",
            message=f"hf_overrides removes {removed} from the config",
        )
    try:
        json.dumps(overrides)
    except TypeError as error:
        raise ConfigError(
            "hf_overrides", overrides, "JSON values in the new config", str(error)
        ) from error
    merge_overrides(hf, copy.deepcopy(overrides))
    if generation is not None:
        hf[GENERATION_KEY] = generation
    return overrides


def _difference(
    before: Mapping[str, Any], after: Mapping[str, Any], path: str
) -> tuple[dict[str, Any], list[str]]:
    """Nested changes from ``before`` to ``after``, and the dotted keys that are gone."""
    changed: dict[str, Any] = {}
    removed = [path + key for key in before if key not in after]
    for key, value in after.items():
        old = before.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            inner, gone = _difference(old, value, f"{path}{key}.")
            removed += gone
            if inner:
                changed[key] = inner
        elif key not in before or old != value:
            changed[key] = copy.deepcopy(value)
    return changed, removed


def model_config(
    hf: dict[str, Any],
    *,
    model: str,
    tokenizer: str,
    dtype: DType,
    field: str,
    max_model_len: int | None = None,
    fallback_length: int | None = None,
    **extra: Any,
) -> ModelConfig:
    """Build a ModelConfig from a config dict the caller hands over.

    Args:
        hf: Config after overrides; kept by reference in the result.
        field: Setting that named the model, for error messages.
        max_model_len: User limit in tokens; must not exceed what the checkpoint declares.
        fallback_length: Length to assume when the checkpoint declares none.
        extra: Further ModelConfig fields taken as they are.
    """
    hf = dict(hf)
    generation = hf.pop(GENERATION_KEY, None) or {}
    text = full_text(hf)
    derived = extra.pop("derived_max_model_len", None) or declared_length(hf) or fallback_length
    if derived is None:
        raise FormatError(
            f"{field}: config.json['max_position_embeddings']",
            None,
            "a positive integer",
            "set max_model_len in hf_overrides or repair the checkpoint",
        )
    if max_model_len is not None and max_model_len > derived:
        raise ConfigError(
            f"{field.rpartition('.')[0]}.max_model_len".lstrip("."),
            max_model_len,
            f"at most {derived}, the length {model!r} declares",
            f"lower it to {derived} or less, or extend RoPE through hf_overrides",
        )
    hidden = _required(text, "hidden_size", field, model)
    heads = _required(text, "num_attention_heads", field, model)
    layers = text.get("num_hidden_layers", 0)
    layer_types = text.get("layer_types") or ()
    uses_window = text.get("use_sliding_window", True)
    ends = config_ends(hf, text, generation)
    bos = hf.get("bos_token_id", text.get("bos_token_id"))
    bos_ids = _ids(bos)
    architectures = hf.get("architectures") or [""]
    head_dtype = hf.get("head_dtype") or text.get("head_dtype")
    quantization = extra.pop("quantization", None) or quantization_method(hf)
    return ModelConfig(
        model=model,
        tokenizer=tokenizer,
        dtype=dtype,
        checkpoint_dtype=checkpoint_dtype(hf),
        head_dtype=str(head_dtype) if head_dtype else None,
        quantization=quantization,
        max_model_len=max_model_len or derived,
        derived_max_model_len=derived,
        vocab_size=_required(text, "vocab_size", field, model),
        hidden_size=hidden,
        num_hidden_layers=int(layers or 0),
        num_attention_heads=heads,
        num_key_value_heads=min(heads, int(text.get("num_key_value_heads") or heads)),
        head_dim=int(text.get("head_dim") or max(1, hidden // heads)),
        architecture=str(architectures[0]),
        model_type=str(hf.get("model_type") or ""),
        is_moe=is_moe(hf),
        eos_token_ids=tuple(sorted(ends)),
        bos_token_id=bos_ids[0] if bos_ids else None,
        sliding_window=text.get("sliding_window") if uses_window else None,
        layer_types=tuple(str(kind) for kind in layer_types),
        hf_config=hf,
        **extra,
    )
