"""Fields of ``EngineArgs``: the flat, user-facing settings, under vLLM's names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specconfig.errors import ConfigError, check_keys, from_validation
from specconfig.facts.source import expand
from specconfig.model import DType, Placement
from specconfig.options import SECTION, normalise_keys

_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9,
    "k": 2**10, "kib": 2**10, "m": 2**20, "mib": 2**20, "g": 2**30, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_bytes(value: object) -> int | None:
    """Bytes from an int or a string such as '512MiB' (binary) or '2GB' (decimal)."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(
            "kv_cache_memory_bytes",
            value,
            "an integer of bytes, or a number with KiB, MiB or GiB",
            "write for example 512MiB",
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


class EngineFields(BaseModel):
    """What the user wrote, type-checked; ``EngineArgs`` adds how it is resolved."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(
        description="Target model: directory (~ and $VARS expanded), .gguf file, or hub id."
    )
    tokenizer: str | None = Field(default=None, description="Tokenizer; None = the model's.")
    revision: str | None = Field(default=None, description="Hub revision of the model.")
    tokenizer_revision: str | None = Field(
        default=None, description="Hub revision of the tokenizer; None = `revision`."
    )
    dtype: DType = Field(
        default="auto", description="Compute dtype; auto = checkpoint's on GPU, float32 on CPU."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto = CUDA if present when the engine starts."
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="Longest sequence in tokens; None = the checkpoint's."
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="Ranks that share each layer.")
    data_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Replicas that start and restart as one gang; they step together only where "
        "they share experts (enable_expert_parallel).",
    )
    pipeline_parallel_size: int = Field(default=1, ge=1, description="Must be 1.")
    enable_expert_parallel: bool = Field(
        default=False, description="Spread experts over the ranks instead of splitting each."
    )
    max_num_seqs: int = Field(default=32, ge=1, description="Requests decoded together.")
    max_num_batched_tokens: int = Field(
        default=512, ge=1, description="Tokens one step may run, prompts and drafts included."
    )
    block_size: int = Field(default=16, ge=1, description="Tokens per KV block.")
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of a GPU's whole memory for weights, activations and KV of this "
        "replica's processes on it; CPUs do not read it.",
    )
    kv_cache_memory_bytes: int | None = Field(
        default=None, ge=1, description="KV bytes per rank, or '512MiB'; None = engine sizes it."
    )
    enable_prefix_caching: bool = Field(default=True, description="Reuse KV of equal prefixes.")
    enable_chunked_prefill: bool = Field(default=True, description="Split long prompts over steps.")
    seed: int | None = Field(
        default=None,
        ge=0,
        description="Seed of requests that bring none: number n that an ingress replica takes "
        "draws from (seed, n). None = fresh seeds.",
    )
    hf_overrides: dict[str, Any] | Callable[[dict[str, Any]], Any] | None = Field(
        default=None,
        description="Nested patch of the target's config, or a function of it.",
    )
    trust_remote_code: bool = Field(default=False, description="Must be false.")
    served_model_name: str | None = Field(
        default=None, description="Name clients use; None = `model`."
    )
    max_num_queued_requests: int = Field(
        default=256, ge=0, description="Waiting requests before new ones are refused."
    )
    max_logprobs: int = Field(default=20, ge=0, description="Largest top-n logprobs per token.")
    placement: Placement = Field(default="auto", description="Processes of a separate draft model.")
    strict_pack: bool = Field(
        default=False, description="All ranks of a replica on one node; otherwise if possible."
    )
    batch_invariant: bool = Field(
        default=True, description="Bitwise equal outputs for any batching and any K."
    )
    compile_layers: Literal["auto", "on", "off"] = Field(
        default="auto", description="Compile decoder layers."
    )
    num_threads: int | None = Field(default=None, ge=1, description="CPU threads per rank.")
    step_timeout_s: float | None = Field(
        default=None,
        gt=0,
        le=3600,
        description="A step that takes longer ends the replica; None = many times what such steps "
        "took so far.",
    )
    target_gpu_fraction: float = Field(
        default=0.7, gt=0, le=1, description="GPU share of a target rank next to a draft rank."
    )
    draft_gpu_fraction: float = Field(
        default=0.3, ge=0, lt=1, description="GPU share of a draft rank."
    )
    dynamic_k_dp_policy: Literal["disable", "agree"] = Field(
        default="disable", description="Dynamic K with data parallelism: static K, or one agreed K."
    )
    speculative_config: dict[str, Any] | None = Field(
        default=None, description="Speculation; None = plain decoding. See SpeculativeOptions."
    )
    spec_method: str | None = Field(
        default=None, description="Short for speculative_config.method."
    )
    spec_model: str | None = Field(default=None, description="Short for speculative_config.model.")
    spec_tokens: int | None = Field(
        default=None, description="Short for speculative_config.num_speculative_tokens."
    )

    def __init__(self, **data: Any) -> None:
        clean = unify_keys(data)
        check_keys("", clean, type(self).model_fields)
        try:
            super().__init__(**clean)
        except ValidationError as error:
            raise from_validation(error, "", type(self).model_fields) from None

    @field_validator("kv_cache_memory_bytes", mode="before")
    @classmethod
    def _kv_bytes(cls, value: object) -> int | None:
        return parse_bytes(value)

    @field_validator("trust_remote_code")
    @classmethod
    def _no_remote_code(cls, value: bool) -> bool:
        if value:
            raise ConfigError(
                "trust_remote_code",
                value,
                "false: code from model repositories is never run",
                "use a model that transformers supports without its own code",
            )
        return value

    @field_validator("pipeline_parallel_size")
    @classmethod
    def _no_pipeline(cls, value: int) -> int:
        if value != 1:
            raise ConfigError(
                "pipeline_parallel_size",
                value,
                "1: layers are not spread over stages",
                "use tensor_parallel_size",
            )
        return value

    @model_validator(mode="after")
    def _fractions(self) -> Self:
        total = self.target_gpu_fraction + self.draft_gpu_fraction
        if total > 1 + 1e-9:
            raise ConfigError(
                "draft_gpu_fraction",
                self.draft_gpu_fraction,
                f"at most {1 - self.target_gpu_fraction:g} beside target_gpu_fraction="
                f"{self.target_gpu_fraction:g}",
                "lower one of the two so that they sum to at most 1",
            )
        return self

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Self:
        """Build from a parsed YAML or JSON mapping; raises ConfigError, not ValidationError."""
        return cls(**{str(key): value for key, value in data.items()})


def unify_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """One spelling per key: hyphens, dotted ``speculative_config.x`` keys and JSON text.

    Raises:
        ConfigError: the same key in two spellings.
    """
    clean: dict[str, Any] = {}
    dotted: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        section, dot, inner = name.partition(".")
        place, name = (dotted, inner) if dot and section == SECTION else (clean, name)
        if name in place:
            raise ConfigError(name, value, "one spelling per key", f"remove one of the {name!r}")
        place[name] = value
    given = clean.get(SECTION)
    if isinstance(given, str):
        given = parse_speculative_json(given)
    if dotted:
        given = normalise_keys(given or {})
        for name, value in dotted.items():
            if name in given:
                raise ConfigError(
                    f"{SECTION}.{name}",
                    value,
                    "one spelling per key",
                    f"remove one of the {name!r}",
                )
            given[name] = value
    if given is not None:
        clean[SECTION] = given
    return clean


FLAGS = (
    ("spec_method", "method"),
    ("spec_model", "model"),
    ("spec_tokens", "num_speculative_tokens"),
)
"""Short flags and the speculative_config key each one sets."""


def merge_flags(args: EngineFields) -> dict[str, Any] | None:
    """``speculative_config`` with the three short flags merged in; None when neither is given.

    Raises:
        ConfigError: a flag and the dict set the same field, in any spelling, even with null.
    """
    given = args.speculative_config
    merged = None if given is None else normalise_keys(given)
    for flag, key in FLAGS:
        value = getattr(args, flag)
        if value is None:
            continue
        merged = {} if merged is None else merged
        if key in merged:
            spelled = "--" + flag.replace("_", "-")
            raise ConfigError(
                flag,
                value,
                f"either {spelled} or speculative_config[{key!r}]",
                f"remove {spelled} or the key {key!r}",
                message=f"{spelled} and speculative_config[{key!r}] are mutually exclusive",
            )
        merged[key] = value
    return merged


def parse_speculative_json(text: str) -> dict[str, Any]:
    """A mapping from inline JSON, or from a file when written '@path'.

    Raises:
        ConfigError: not an object; shows the received string, since shells mangle quotes.
    """
    try:
        body = Path(expand(text[1:])).read_text(encoding="utf-8") if text.startswith("@") else text
        loaded = json.loads(body)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "speculative_config",
            text,
            "a JSON object, or @file.json with one",
            "quote the whole JSON once, in single quotes",
            message=f"speculative_config could not be read ({error}); received {text!r}",
        ) from None
    if not isinstance(loaded, dict):
        raise ConfigError(
            "speculative_config",
            text,
            "a JSON object",
            "quote the whole JSON once, in single quotes",
            message=f"speculative_config is a {type(loaded).__name__}, not an object; "
            f"received {text!r} (escaped twice?)",
        )
    return loaded
