"""Which code reads each option. An option that nobody reads yet is refused at start.

A setting that is accepted and changes nothing is worse than an error: what is measured afterwards
is something else than what was asked for. So every field has a line here, a test holds the lines
against the code, and ``check_supported`` refuses what this version only knows by name.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from specconfig.acceptance import BUILTIN
from specconfig.engine import EngineConfig
from specconfig.errors import ConfigError
from specconfig.method_names import CONFIG_BY_METHOD
from specconfig.options import SECTION, SpeculativeOptions
from specconfig.registry import load_class


@dataclass(frozen=True)
class Reader:
    """``where`` ("module:qualname") reads the option as ``attribute`` of the resolved plan."""

    where: str
    attribute: str


@dataclass(frozen=True)
class Planned:
    """Nobody acts on it yet: only its default is accepted. ``what`` will read it.

    ``guard`` is a module that reads it already, but only to refuse a value.
    """

    what: str
    guard: str | None = None


@dataclass(frozen=True)
class Fixed:
    """One value is valid, or another field takes it over; validation sees to it."""

    why: str


Entry = Reader | Planned | Fixed

_LIMITS = "actors.verifier.limits:EngineLimits.from_config"
_LOAD = "actors.model.trunk:Trunk"
_HOST = "actors.model.host:_load"
_PLACE = "parallel.placement:place_replica"
_TOKENIZER = "actors.startup.preflight:load_tokenizer"
_APP = "deploy.app:build"
_INGRESS = "deploy.app:Ingress"
_DRAFTER = Reader("actors.startup.preflight:import_drafter", "drafter_implementation")
_DRAFT_MODEL = "actors.draft.drafters.draft_model:DraftModelDrafter"
_NGRAM = "actors.draft.drafters.ngram:NgramDrafter"
_SHORT = Fixed("short for a key of speculative_config")
_RULE = "actors.startup.preflight:build_acceptance"
_RULE_OPTION = Reader(_RULE, "acceptance_options")
_SUFFIX = Planned("the suffix drafter")
_HEADS = Planned("drafters with a reduced candidate set")
_GPU_KERNELS = Planned("kernels chosen for the draft alone")

ENGINE_READERS: Mapping[str, Entry] = {
    "model": Reader(_LOAD, "config.model"),
    "tokenizer": Reader(_TOKENIZER, "model.tokenizer"),
    "revision": Reader(_LOAD, "config.revision"),
    "tokenizer_revision": Reader(_TOKENIZER, "model.tokenizer_revision"),
    "dtype": Reader(_LOAD, "config.dtype"),
    "device": Reader("actors.startup.workers:resolve_device", "runtime.device"),
    "max_model_len": Reader(_LIMITS, "max_model_len"),
    "tensor_parallel_size": Reader(_PLACE, "parallel.tensor_parallel_size"),
    "data_parallel_size": Reader("deploy.gang:take_seat", "parallel.data_parallel_size"),
    "pipeline_parallel_size": Fixed("1: layers are not spread over stages"),
    "enable_expert_parallel": Reader(
        "actors.model.host:load_target", "parallel.enable_expert_parallel"
    ),
    "max_num_seqs": Reader(_LIMITS, "max_num_active_seqs"),
    "max_num_batched_tokens": Reader(_LIMITS, "scheduler.max_num_batched_tokens"),
    "block_size": Reader(_LIMITS, "cache.block_size"),
    "gpu_memory_utilization": Reader(
        "actors.startup.preflight:size_kv", "cache.gpu_memory_utilization"
    ),
    "kv_cache_memory_bytes": Reader(
        "actors.startup.preflight:size_kv", "cache.kv_cache_memory_bytes"
    ),
    "enable_prefix_caching": Reader(_LIMITS, "cache.enable_prefix_caching"),
    "enable_chunked_prefill": Reader(_LIMITS, "scheduler.enable_chunked_prefill"),
    "seed": Reader("deploy.facts:ServedModel.of", "runtime.seed"),
    "hf_overrides": Reader(_LOAD, "config.hf_overrides"),
    "trust_remote_code": Fixed("false: no code of a model repository is run"),
    "served_model_name": Reader("deploy.facts:ServedModel.of", "runtime.served_model_name"),
    "max_num_queued_requests": Reader(_LIMITS, "scheduler.max_num_queued_requests"),
    "max_logprobs": Reader(_LIMITS, "runtime.max_logprobs"),
    "placement": Reader(_PLACE, "draft_placement"),
    "strict_pack": Reader("parallel.placement:pack_strategy", "parallel.strict_pack"),
    "batch_invariant": Reader(_HOST, "runtime.batch_invariant"),
    "compile_layers": Reader(_HOST, "runtime.compile_layers"),
    "num_threads": Reader("actors.startup.launch:Replica", "runtime.num_threads"),
    "step_timeout_s": Reader("actors.startup.launch:Replica", "runtime.step_timeout_s"),
    "target_gpu_fraction": Reader(_PLACE, "runtime.target_gpu_fraction"),
    "draft_gpu_fraction": Reader(_PLACE, "runtime.draft_gpu_fraction"),
    "dynamic_k_dp_policy": Reader("deploy.gang:agrees_on_k", "parallel.dynamic_k_dp_policy"),
    "speculative_config": Fixed("a section; its keys are below"),
    "spec_method": _SHORT,
    "spec_model": _SHORT,
    "spec_tokens": _SHORT,
    "num_replicas": Reader(_APP, "args.resolved_num_replicas"),
    "num_ingress_replicas": Reader(_APP, "args.num_ingress_replicas"),
    "max_ongoing_requests": Reader(_APP, "args.resolved_max_ongoing_requests"),
    "api_keys_env": Reader(_INGRESS, "args.api_keys_env"),
    "request_timeout_s": Reader(_INGRESS, "args.request_timeout_s"),
    "stream_interval_tokens": Reader(_INGRESS, "args.stream_interval_tokens"),
    "stream_keepalive_s": Reader(_INGRESS, "args.stream_keepalive_s"),
    "allowed_origins": Reader(_INGRESS, "args.allowed_origins"),
}
"""Fields of ``AppArgs``, those of ``EngineArgs`` among them."""

SPECULATIVE_READERS: Mapping[str, Entry] = {
    "method": _DRAFTER,
    "model": Reader("actors.model.host:load_draft", "config.draft_model"),
    "speculator_options": Fixed("handed to the drafter of a registered method that lists it"),
    "draft_tensor_parallel_size": Reader(
        "parallel.placement:drafter_seat", "config.draft_parallel"
    ),
    "draft_load_config": Planned("other ways to load a draft's weights"),
    "revision": Reader(_LOAD, "config.revision"),
    "code_revision": Planned("code from model repositories, which is never run"),
    "max_model_len": Reader(_DRAFT_MODEL, "config.draft_max_model_len"),
    "enforce_eager": Planned("compiling the draft apart from the target"),
    "num_speculative_tokens": Reader(_LIMITS, "num_speculative_tokens"),
    "num_speculative_tokens_per_batch_size": Reader(_LIMITS, "num_speculative_tokens_for_batch"),
    "num_speculative_tokens_schedule": Reader(_LIMITS, "follows_goodput"),
    "parallel_drafting": _DRAFTER,
    "disable_padded_drafter_batch": Planned("padded drafter batches"),
    "index_share_for_mtp_iteration": Planned("MTP drafters with sparse attention"),
    "quantization": Planned("quantised drafts"),
    "moe_backend": _GPU_KERNELS,
    "attention_backend": _GPU_KERNELS,
    "kv_cache_dtype": Planned("a KV dtype of the draft alone"),
    "draft_lm_head_quantization": Planned("quantised output heads"),
    "use_local_argmax_reduction": Planned(
        "drafts from full logits: the argmax is per shard always"
    ),
    "use_heterogeneous_vocab": Planned("drafting with another vocabulary"),
    "draft_sample_method": Planned(
        "a drafter with probabilities", guard="actors.startup.preflight"
    ),
    "dspark_draft_topk": _HEADS,
    "xpress_topc": _HEADS,
    "prompt_lookup_max": Reader(_NGRAM, "options.prompt_lookup_max"),
    "prompt_lookup_min": Reader(_NGRAM, "options.prompt_lookup_min"),
    "suffix_decoding_max_tree_depth": _SUFFIX,
    "suffix_decoding_max_cached_requests": _SUFFIX,
    "suffix_decoding_max_spec_factor": _SUFFIX,
    "suffix_decoding_min_token_prob": _SUFFIX,
    "disable_eagle_block_drop": Reader(_LIMITS, "draft_law"),
    "disable_lookahead_block_hashes": Reader(_LIMITS, "draft_law"),
    "rejection_sample_method": Reader(_RULE, "acceptance_implementation"),
    "acceptance_options": _RULE_OPTION,
    "synthetic_acceptance_rates": _RULE_OPTION,
    "synthetic_acceptance_length": _RULE_OPTION,
    "fly_window_size": _RULE_OPTION,
    "fly_entropy_threshold": _RULE_OPTION,
    "fly_entropy_top_k": _RULE_OPTION,
    "enable_adaptive_verification": Planned("adaptive verification"),
    "tensor_parallel_size": Fixed("never valid here"),
    "draft_model_config": Planned("the extractor of hidden states"),
}
"""Keys of ``speculative_config``."""


def is_installed(qualified: str) -> bool:
    """Whether the module of ``module:name`` is there; nothing of it is imported."""
    module = qualified.partition(":")[0]
    if module in sys.modules:
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # A parent package is missing.
        return False


def check_supported(config: EngineConfig) -> None:
    """Refuse a valid plan that this installation cannot carry out, before anything is loaded.

    Raises:
        ConfigError: a drafter or an acceptance rule is missing, or an option has no reader yet.
    """
    spec = config.speculative
    if spec is None:
        return
    drafter = spec.speculator.implementation
    if drafter is not None:
        known = {name: load_class(path).implementation for name, path in CONFIG_BY_METHOD.items()}
        _require("method", spec.custom_method or spec.method, drafter, known)
    for name, value in spec.requested.items():
        entry, default = SPECULATIVE_READERS[name], SpeculativeOptions.model_fields[name].default
        if isinstance(entry, Planned) and value != default:
            raise ConfigError(
                f"{SECTION}.{name}",
                value,
                "",
                "remove it" if default is None else f"remove it, or set it to {default!r}",
                message=f"{SECTION}.{name}={value!r} is not part of this version (it is for "
                f"{entry.what})",
            )
    rules = {name: method.implementation for name, method in BUILTIN.items()}
    rule = spec.rejection_sample_method
    _require("rejection_sample_method", rule, spec.acceptance_implementation, rules)


def _require(field: str, name: str, needed: str, known: Mapping[str, str | None]) -> None:
    if is_installed(needed):
        return
    there = sorted(other for other, path in known.items() if path and is_installed(path))
    raise ConfigError(
        f"{SECTION}.{field}",
        name,
        ", ".join(there),
        "use one of these, or install what provides it",
        message=f"{SECTION}.{field}={name!r} needs {needed}, which is not part of this version "
        "nor installed beside it",
    )
