"""The frozen parts of a resolved plan: model, cache, scheduler, parallel layout, runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specconfig.kv_sizes import kv_bytes_per_token

DType = Literal["auto", "float32", "bfloat16", "float16"]
Placement = Literal["auto", "fused", "colocated", "dedicated"]

DTYPE_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "auto": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1,
}  # fmt: skip


_TEXT_SECTIONS = ("text_config", "llm_config", "language_config")


def text_section(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Language part of a possibly nested config; never a copy of a flat one."""
    thinker = hf.get("thinker_config")
    if isinstance(thinker, Mapping):
        return text_section(thinker)
    for name in _TEXT_SECTIONS:
        section = hf.get(name)
        if isinstance(section, Mapping) and section:
            return dict(section)
    return hf if isinstance(hf, dict) else dict(hf)


class Frozen(BaseModel):
    """Base of every resolved section: immutable, and no field we did not declare."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        validate_default=True,
        # Checkpoint configs may hold Infinity; null would not read back as a number.
        ser_json_inf_nan="constants",
    )


class ModelConfig(Frozen):
    """Facts about one checkpoint plus the few run-time choices tied to it.

    ``hf_config`` is the checkpoint's config after overrides and, for a draft, after the rewrites
    of its method. It is shared by reference inside a process: treat it as read-only.
    """

    model: str = Field(description="Directory, GGUF file or hub id of the weights.")
    model_weights: str | None = Field(
        default=None, description="Original weight location when `model` is a cache of it."
    )
    tokenizer: str = Field(description="Directory or hub id of the tokenizer.")
    revision: str | None = Field(default=None, description="Hub revision of the weights.")
    tokenizer_revision: str | None = Field(default=None, description="Hub revision of tokenizer.")
    dtype: DType = Field(description="Compute dtype; 'auto' until the device is known.")
    checkpoint_dtype: str = Field(description="dtype the weights are stored in.")
    head_dtype: str | None = Field(
        default=None, description="dtype the output head must run in, when the checkpoint says so."
    )
    quantization: str | None = Field(default=None, description="Weight quantisation scheme.")
    max_model_len: int = Field(ge=1, description="Longest sequence, in tokens.")
    derived_max_model_len: int = Field(ge=1, description="Limit the checkpoint declares, tokens.")
    vocab_size: int = Field(ge=1, description="Rows of the embedding, padding rows included.")
    hidden_size: int = Field(ge=1, description="Width of the residual stream.")
    num_hidden_layers: int = Field(ge=0, description="Decoder layers.")
    num_attention_heads: int = Field(ge=1, description="Query heads.")
    num_key_value_heads: int = Field(ge=1, description="Key/value heads.")
    head_dim: int = Field(ge=1, description="Width of one head.")
    architecture: str = Field(description="First entry of `architectures`, or ''.")
    model_type: str = Field(description="HF model_type.")
    is_moe: bool = Field(description="Whether any layer has routed experts.")
    eos_token_ids: tuple[int, ...] = Field(
        description="Ids that end an answer: of the configs, the tokenizer and its chat template."
    )
    bos_token_id: int | None = Field(description="Id that starts a sequence, if any.")
    sliding_window: int | None = Field(default=None, description="Window in tokens, if used.")
    layer_types: tuple[str, ...] = Field(default=(), description="Per-layer attention kind.")
    hf_overrides: dict[str, Any] | None = Field(
        default=None, description="Nested difference to the checkpoint's config, for the loader."
    )
    hf_config: dict[str, Any] = Field(description="Checkpoint config after overrides.")

    @property
    def text_config(self) -> dict[str, Any]:
        """The language part of a nested (multimodal) config, or the whole config."""
        return text_section(self.hf_config)

    @property
    def compute_dtype(self) -> str:
        """dtype used for size arithmetic: the resolved one, else the checkpoint's."""
        return self.dtype if self.dtype != "auto" else self.checkpoint_dtype

    @property
    def kv_layers(self) -> int:
        """Layers that keep per-token keys and values (recurrent layers keep none)."""
        if not self.layer_types:
            return self.num_hidden_layers
        return sum("attention" in kind and "linear" not in kind for kind in self.layer_types)

    def kv_bytes_per_token(self, layers: int | None = None, kv_dtype: str | None = None) -> int:
        """KV bytes one token costs over all tensor-parallel ranks together."""
        count = self.kv_layers if layers is None else layers
        width = DTYPE_BYTES.get(kv_dtype or self.compute_dtype, 2)
        text = self.text_config
        if text.get("kv_lora_rank"):
            # Latent attention caches one compressed vector and one rope key, not K and V per head.
            return (
                count * width * (int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim", 0)))
            )
        return kv_bytes_per_token(count, self.num_key_value_heads, self.head_dim, width)


class CacheConfig(Frozen):
    """Paged KV cache."""

    block_size: int = Field(ge=1, description="Tokens per KV block.")
    kv_cache_memory_bytes: int | None = Field(
        default=None, ge=1, description="Bytes of KV per rank; None = sized by the engine."
    )
    gpu_memory_utilization: float = Field(
        gt=0, le=1, description="Share of a whole GPU for this replica."
    )
    enable_prefix_caching: bool = Field(description="Reuse KV of equal prefixes.")


class SchedulerConfig(Frozen):
    """Batch limits."""

    max_num_seqs: int = Field(ge=1, description="Requests decoded together (as configured).")
    max_num_batched_tokens: int = Field(ge=1, description="Tokens per step, all requests.")
    enable_chunked_prefill: bool = Field(description="Split prompts over steps.")
    max_num_queued_requests: int = Field(ge=0, description="Waiting requests before 429.")


class ParallelConfig(Frozen):
    """Process layout of one model."""

    tensor_parallel_size: int = Field(default=1, ge=1, description="Shards of each layer.")
    data_parallel_size: int = Field(default=1, ge=1, description="Replicas of one gang.")
    pipeline_parallel_size: int = Field(default=1, ge=1, le=1, description="Always 1.")
    enable_expert_parallel: bool = Field(default=False, description="Spread experts over ranks.")
    placement: Placement = Field(
        default="auto", description="Where the ranks of a separate draft model run."
    )
    strict_pack: bool = Field(default=False, description="All ranks of a replica on one node.")
    dynamic_k_dp_policy: Literal["disable", "agree"] = Field(
        default="disable", description="Dynamic K under data parallelism."
    )

    @property
    def experts_span_replicas(self) -> bool:
        """Whether data-parallel replicas share one set of experts and step together."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def num_expert_ranks(self) -> int:
        """Ranks over which whole experts are spread; 1 without expert parallelism."""
        size = self.tensor_parallel_size * self.data_parallel_size
        return size if self.enable_expert_parallel else 1


class RuntimeConfig(Frozen):
    """Choices about running that no model depends on."""

    device: Literal["auto", "cpu", "cuda"] = Field(description="'auto': settled by each worker.")
    batch_invariant: bool = Field(description="Bitwise equal output for any batching or K.")
    compile_layers: Literal["auto", "on", "off"] = Field(description="Compile decoder layers.")
    num_threads: int | None = Field(default=None, ge=1, description="CPU threads per rank.")
    step_timeout_s: float | None = Field(
        default=None, gt=0, description="Limit of each step; None = learnt from the steps."
    )
    seed: int | None = Field(
        ge=0, description="Seed of requests that bring none; None = a fresh one for each."
    )
    target_gpu_fraction: float = Field(gt=0, le=1, description="GPU share of a target rank.")
    draft_gpu_fraction: float = Field(ge=0, lt=1, description="GPU share of a draft rank.")
    max_logprobs: int = Field(ge=0, description="Largest top-n logprobs a request may ask.")
    served_model_name: str = Field(description="Model name clients use.")
