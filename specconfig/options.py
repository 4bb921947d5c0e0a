"""Fields a user may write under ``speculative_config``, grouped by purpose.

``SpeculativeFields`` are shared by the user's form (``SpeculativeOptions``) and the resolved form
(``specconfig.speculative.SpeculativeConfig``). A value of None means "not given".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from specconfig.dynamic_k import KTable, parse_table
from specconfig.errors import ConfigError, check_keys, from_validation

SECTION = "speculative_config"

MoeBackend = Literal[
    "auto", "triton", "triton_unfused", "deep_gemm", "cutlass", "flashinfer_cutlass",
    "flashinfer_trtllm", "flashinfer_cutedsl", "marlin", "humming", "aiter", "emulation",
    "batched_triton", "batched_deep_gemm", "torch", "grouped_mm",
]  # fmt: skip
ATTENTION_BACKENDS = (
    "SDPA", "EAGER", "FLEX_ATTENTION", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLASHMLA",
)  # fmt: skip


class SpeculativeFields(BaseModel):
    """Every user-visible field."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), ser_json_inf_nan="constants"
    )

    # Draft source and parallelism
    method: str | None = Field(
        default=None, description="Algorithm; inferred from `model` when missing."
    )
    model: str | None = Field(
        default=None, description="Draft weights: directory, hub id, or a dotted class path."
    )
    speculator_options: dict[str, Any] | None = Field(
        default=None, description="Free options of a registered custom method."
    )
    draft_tensor_parallel_size: int | None = Field(
        default=None, ge=1, description="Draft TP: 1 or the target's; None = the target's."
    )
    draft_load_config: dict[str, Any] | None = Field(
        default=None, description="Draft weight loading; None = the target's."
    )
    revision: str | None = Field(default=None, description="Hub revision of the draft.")
    code_revision: str | None = Field(default=None, description="No repo code is run.")
    max_model_len: int | None = Field(
        default=None, ge=1, description="Drafting stops beyond this many tokens of a sequence."
    )
    enforce_eager: bool | None = Field(
        default=None, description="Do not compile the drafter's layers."
    )

    # Budget, dynamic K, drafting shape
    num_speculative_tokens: int | None = Field(
        default=None, gt=0, description="K: draft tokens per request and step."
    )
    num_speculative_tokens_per_batch_size: KTable | None = Field(
        default=None,
        description="Inclusive ranges [first, last, K] over the number of scheduled requests.",
    )
    num_speculative_tokens_schedule: Literal["goodput", "constant"] | None = Field(
        default=None,
        description="goodput: each request and step gets as many drafts as measured costs and "
        "acceptance say pay, up to K; constant: K, or the table's. None = goodput, but constant "
        "with a table, with data parallelism and with a lossy rule.",
    )
    parallel_drafting: bool = Field(
        default=False, description="All K drafts in one pass (PARD, P-EAGLE); needs a mask token."
    )
    disable_padded_drafter_batch: bool = Field(
        default=False, description="Use compact drafter batches (the plain oracle path)."
    )
    index_share_for_mtp_iteration: bool | None = Field(
        default=None, description="MTP: reuse the first step's sparse indices; None = checkpoint."
    )

    # Overrides for the draft only
    quantization: str | None = Field(default=None, description="Draft weight quantisation.")
    moe_backend: MoeBackend | None = Field(
        default=None, description="Draft MoE kernel; None = the target's."
    )
    attention_backend: str | None = Field(
        default=None, description="Draft attention backend; None or 'auto' = the target's."
    )
    kv_cache_dtype: str | None = Field(
        default=None, description="Draft KV dtype; None = the target's."
    )
    draft_lm_head_quantization: Literal["fp8", "nvfp4"] | None = Field(
        default=None, description="Quantise the drafter's copy of a shared output head."
    )
    use_local_argmax_reduction: bool = Field(
        default=False, description="Greedy drafts from per-shard argmax, no full logits."
    )
    use_heterogeneous_vocab: bool = Field(
        default=False, description="Draft with another vocabulary through the shared tokens."
    )
    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        default="greedy", description="One-hot drafts, or draws with their distribution kept."
    )
    dspark_draft_topk: int | None = Field(
        default=None, ge=1, description="DSpark: candidates of the sequential head."
    )
    xpress_topc: int | None = Field(
        default=None, ge=0, description="XPress: candidates per position; 0 = full vocabulary."
    )

    # Lookup drafters
    prompt_lookup_max: int | None = Field(
        default=None, ge=1, description="n-gram: longest suffix looked up, tokens (default 5)."
    )
    prompt_lookup_min: int | None = Field(
        default=None, ge=1, description="n-gram: shortest suffix looked up, tokens (default 5)."
    )
    suffix_decoding_max_tree_depth: int = Field(
        default=24, ge=1, description="Suffix: longest pattern plus draft, tokens; also default K."
    )
    suffix_decoding_max_cached_requests: int = Field(
        default=10000, ge=0, description="Suffix: finished requests kept; 0 = prompt trees only."
    )
    suffix_decoding_max_spec_factor: float = Field(
        default=1.0, ge=0, description="Suffix: draft length per matched token."
    )
    suffix_decoding_min_token_prob: float = Field(
        default=0.1, ge=0, le=1, description="Suffix: lowest estimated probability of a draft."
    )

    # Prefix cache and verification
    disable_eagle_block_drop: bool = Field(
        default=False, description="Keep the tail KV block of prefix hits (experimental)."
    )
    disable_lookahead_block_hashes: bool = Field(
        default=False, description="Drop the tail block instead of hashing past it."
    )
    rejection_sample_method: str = Field(
        default="standard",
        description="Acceptance rule: standard, block, synthetic or fly (both lossy), a registered "
        "name, or 'package.module:Name'.",
    )
    acceptance_options: dict[str, Any] | None = Field(
        default=None, description="Keyword options of an acceptance rule that is not built in."
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = Field(
        default=None, description="P(first i+1 drafts accepted), length K, non-increasing."
    )
    synthetic_acceptance_length: float | None = Field(
        default=None, description="Mean output tokens per step, in [1, K+1]."
    )
    fly_window_size: int | None = Field(
        default=None, ge=1, description="FLy: drafts that must agree after a tolerated one."
    )
    fly_entropy_threshold: float = Field(
        default=0.3, ge=0, description="FLy: least top-k entropy to tolerate, nats."
    )
    fly_entropy_top_k: int = Field(default=3, ge=1, description="FLy: support of the entropy.")
    enable_adaptive_verification: bool = Field(
        default=False, description="Trim drafts per request by estimated acceptance."
    )

    @field_validator("attention_backend")
    @classmethod
    def _attention_backend(cls, value: str | None) -> str | None:
        if value is None or value.lower() == "auto":
            return None
        if value.upper() not in ATTENTION_BACKENDS:
            raise ConfigError(
                f"{SECTION}.attention_backend",
                value,
                "auto, " + ", ".join(sorted(ATTENTION_BACKENDS)),
                "pick one, any case",
                message=f"Unknown attention backend {value!r}",
            )
        return value.upper()

    @field_validator("num_speculative_tokens_per_batch_size", mode="before")
    @classmethod
    def _k_table(cls, value: object) -> object:
        return None if value is None else parse_table(value)


class SpeculativeOptions(SpeculativeFields):
    """What the user wrote, type-checked field by field and nothing more."""

    tensor_parallel_size: int | None = Field(
        default=None, description="Never valid here; kept so that the mistake gets a clear error."
    )
    draft_model_config: dict[str, Any] | None = Field(
        default=None, description="extract_hidden_states only: {'hf_config': {...}}."
    )


INJECTED = ("target_model_config", "target_parallel_config", "draft_parallel_config",
             "custom_method")  # fmt: skip
"""Keys that vLLM's object form carries; the engine sets them, so a user's value is dropped."""


def normalise_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """Copy with hyphens turned into underscores; two spellings of one key are refused."""
    clean: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name in clean:
            raise ConfigError(
                f"{SECTION}.{name}", value, "one spelling per key", f"remove {key!r} or {name!r}"
            )
        clean[name] = value
    return clean


def parse_options(given: Mapping[str, Any]) -> SpeculativeOptions:
    """Type-check a user's dict.

    Raises:
        ConfigError: unknown key (with the nearest valid name), wrong type, or out of range.
    """
    clean = {key: value for key, value in normalise_keys(given).items() if key not in INJECTED}
    names = SpeculativeOptions.model_fields
    check_keys(SECTION, clean, names)
    if clean.get("tensor_parallel_size") is not None:
        # Checked before anything else: later errors would hide the actual mistake.
        raise ConfigError(
            f"{SECTION}.tensor_parallel_size",
            clean["tensor_parallel_size"],
            "not valid here",
            "use draft_tensor_parallel_size (1 or the target's)",
            message="'tensor_parallel_size' is not a speculative_config field",
        )
    try:
        return SpeculativeOptions(**clean)
    except ValidationError as error:
        raise from_validation(error, SECTION, names) from None
