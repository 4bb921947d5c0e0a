"""Checkpoints the configuration tests resolve against: config dicts by model name, no files."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from specconfig.decisions import DecisionLog
from specconfig.engine import EngineConfig
from specconfig.engine_args import EngineArgs
from specconfig.model import ModelConfig, ParallelConfig
from specconfig.resolving.speculation import resolve_speculation
from specconfig.speculative import SpeculativeConfig

TARGET = "meta/target"

Hf = dict[str, Any]


def llama(**changes: Any) -> Hf:
    base: Hf = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "max_position_embeddings": 8192,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    base.update(changes)
    return {key: value for key, value in base.items() if value is not None}


def tiny(**changes: Any) -> Hf:
    base: Hf = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 512,
        "num_hidden_layers": 22,
    }
    return llama(**{**base, **changes})


def head(**changes: Any) -> Hf:
    base: Hf = {
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "rope_scaling": {"rope_type": "default"},
    }
    return llama(**{**base, **changes})


def deepseek(model_type: str, modules: int | None, arch: str, **changes: Any) -> Hf:
    return llama(
        model_type=model_type,
        architectures=[arch],
        num_nextn_predict_layers=modules,
        n_routed_experts=16,
        **changes,
    )


def dspark(**changes: Any) -> Hf:
    base: Hf = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": 7,
        "draft_vocab_size": 16000,
        "mask_token_id": 5,
        "target_layer_ids": [1, 15, 28],
        "num_hidden_layers": 2,
    }
    return llama(**{**base, **changes})


def dflash(**changes: Any) -> Hf:
    base: Hf = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 15, 28]},
    }
    return llama(**{**base, **changes})


def speculator(kind: str, tokens: Any = 5, target: Any = "meta/verifier", **changes: Any) -> Hf:
    base: Hf = {
        "speculators_model_type": kind,
        "architectures": ["AnyDraftModel"],
        "draft_vocab_size": 16000,
        "transformer_layer_config": {
            key: value
            for key, value in head(model_type="llama").items()
            if key not in ("architectures", "torch_dtype", "eos_token_id", "bos_token_id")
        },
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
        },
    }
    base.update(changes)
    return base


BLOCK = {"aux_hidden_state_layer_ids": [2, 5], "mask_token_id": 9}

CATALOG: dict[str, Hf] = {
    TARGET: llama(),
    "meta/verifier": llama(),
    "meta/tiny": tiny(),
    "meta/tiny-pard": tiny(pard_token=31999),
    "meta/tiny-vocab": tiny(vocab_size=30000),
    "meta/tiny-short": tiny(max_position_embeddings=2048),
    "meta/tiny-moe": tiny(num_local_experts=8),
    "meta/six-heads": tiny(num_attention_heads=6, num_key_value_heads=2, hidden_size=384),
    "org/eagle-head": head(),
    "org/EAGLE3-head": head(draft_vocab_size=16000),
    "org/named-eagle3-arch": head(architectures=["LlamaForCausalLMEagle3"]),
    "org/yarn-eagle3": head(
        rope_scaling={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
        },
    ),
    "org/n3-eagle3": head(n_predict=3),
    "org/eagle3-head-fp32": head(head_dtype="float32"),
    "org/peagle3": head(pard_token=31999, draft_vocab_size=16000),
    "org/eagle-mistral-large": head(architectures=["MistralLarge3ForCausalLM"]),
    "org/eagle_head": head(),
    "org/eagle-eagle3-x": head(),
    "org/foo_eagle3_dflash": head(),
    "org/dspark_x-eagle3": head(),
    "org/some-dflash": dflash(),
    "org/dflash-block": dflash(block_size=8),
    "org/muse": dflash(architectures=["MuseGlimmerAssistantModel"],
                       model_type="muse_glimmer_assistant"),
    "org/dflash2-head": dflash(architectures=["DFlash2DraftModel"]),
    "org/lilicorr": dflash(architectures=["LiLiCorrDraftModel"]),
    "org/dflash-mixed": dflash(
        architectures=["DFlashDraftModel"], sliding_window=512,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "org/xpress-dflash": dflash(architectures=["Qwen3XPressModel"], xpress_topc=64),
    "org/dspark_x": dspark(),
    "org/dspark_fill": dspark(sample_from_anchor=False),
    "org/dspark_qwen": dspark(architectures=["DSparkDraftModel"]),
    "org/dspark_only_block": dspark(block_size=None, dspark_block_size=5),
    "org/dspark_no_block": dspark(block_size=None),
    "org/dspark_n3": dspark(block_size=None, n_predict=3),
    "org/dspark_wide": dspark(dspark_draft_topk=40000),
    "org/neutral-gemma": dspark(architectures=["Gemma4DSparkModel"], model_type="gemma4_text",
                                target_layer_ids=[3, 9]),
    "org/neutral-muse": dspark(architectures=["MuseSparkDSparkModel"]),
    "org/neutral-k3": dspark(architectures=["K3DSparkModel"]),
    "org/medusa-head": {
        "medusa_num_heads": 4, "medusa_num_layers": 1, "base_model_name_or_path": TARGET,
    },
    "ds/V3": deepseek("deepseek_v3", 1, "DeepseekV3ForCausalLM"),
    "ds/V3-2": deepseek("deepseek_v3", 2, "DeepseekV3ForCausalLM"),
    "ds/V4": deepseek("deepseek_v4", 1, "DeepseekV4ForCausalLM", dspark_block_size=5,
                      dspark_noise_token_id=3,
                      quantization_config={"quant_method": "fp8"}),
    "ds/V41": deepseek("deepseek_v41", 1, "DeepseekV41ForCausalLM", dspark_block_size=5,
                       dspark_noise_token_id=3),
    "g/assistant": head(model_type="gemma4_assistant", architectures=["Gemma4AssistantModel"]),
    "n/parseaux": head(architectures=["RadioMBartPrefixForCausalLM"], model_type="mbart",
                       decoder={"causal_vision_prefix": True}),
    "s/step3p5": llama(model_type="step3p5", architectures=["Step3p5ForCausalLM"],
                       num_nextn_predict_layers=3),
    "tf/mtp": llama(num_mtp_layers=2),
    "odd/empty-type": tiny(model_type="", architectures=["SomeForCausalLM"]),
    "odd/moe-type": tiny(model_type="moe", architectures=["SomeForCausalLM"]),
    "sp/eagle3": speculator("eagle3"),
    "sp/peagle": speculator("peagle", mask_token_id=9),
    "sp/dflash": speculator("dflash", **BLOCK),
    "sp/dflash2": speculator("dflash2", **BLOCK, draft_vocab_size=32000, conv_kernel_size=2,
                              selector_top_k=None),
    "sp/dspark": speculator("dspark", **BLOCK, block_size=8),
}  # fmt: skip


def facts(model: str, revision: str | None = None) -> Mapping[str, Any]:
    """The injectable facts source over the catalogue (KeyError for unknown names)."""
    return CATALOG[model]


def with_models(extra: Mapping[str, Hf]) -> Any:
    """A facts source over the catalogue plus ``extra``."""
    merged = {**CATALOG, **extra}
    return lambda model, revision: merged[model]


def target(model: str = TARGET, **args: Any) -> ModelConfig:
    """A resolved target."""
    return EngineArgs(model=model, **args).resolve(facts).model


def spec(
    given: Mapping[str, Any],
    *,
    model: str | None = TARGET,
    log: DecisionLog | None = None,
    source: Any = facts,
    target_config: ModelConfig | None = None,
    target_args: Mapping[str, Any] | None = None,
    **parallel: Any,
) -> SpeculativeConfig:
    """Resolve a speculative_config against a target of the catalogue ('K' abbreviates K)."""
    chosen = target_config
    if chosen is None and model is not None:
        chosen = target(model, **(target_args or {}))
    return resolve_speculation(
        expand(given), target=chosen, parallel=ParallelConfig(**parallel), facts=source, log=log
    )


def engine(given: Mapping[str, Any] | None, *, source: Any = facts, **args: Any) -> EngineConfig:
    """Resolve a whole engine on the catalogue's target."""
    chosen = {"model": TARGET, "max_num_batched_tokens": 1024, **args}
    config = expand(given) if given is not None else None
    return EngineArgs(speculative_config=config, **chosen).resolve(source)


def expand(given: Mapping[str, Any]) -> Hf:
    """Private copy with the abbreviation K spelled out."""
    copied = copy.deepcopy(dict(given))
    if "K" in copied:
        copied["num_speculative_tokens"] = copied.pop("K")
    return copied


def warnings_of(given: Mapping[str, Any], **kwargs: Any) -> str:
    """Warnings of one resolution, joined."""
    log = DecisionLog()
    spec(given, log=log, **kwargs)
    return "\n".join(log.warnings)
