"""The graph hash: which settings change the drafter's and the target's computation graphs.

Every field of ``SpeculativeConfig`` is listed once, as a factor or as one that leaves the graph
alone; a test compares the two lists with the class, so a new field cannot be forgotten.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specconfig.model import ModelConfig
    from specconfig.speculative import SpeculativeConfig

GRAPH_FACTORS = frozenset({
    "custom_method", "speculator_options", "draft_model_config", "aux_hidden_state_layer_ids",
    # Through the capability instance: aux flag and hash_factors.
    "config_class", "index_share_for_mtp_iteration", "enable_adaptive_verification",
    # Written into the draft's hf_config, which is hashed.
    "dspark_draft_topk", "xpress_topc",
})  # fmt: skip

NOT_GRAPH = frozenset({
    # Who proposes; the drafter's class decides the graph through the factors above.
    "method", "model", "revision", "code_revision", "draft_load_config", "requested",
    # Shapes and batch layout, which graphs are captured per size for.
    "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "parallel_drafting",
    "disable_padded_drafter_batch", "max_model_len", "draft_length_is_given",
    "draft_shares_target_positions",
    # Where and how ranks run; part of the engine's own key.
    "draft_tensor_parallel_size", "draft_parallel_config", "draft_placement", "enforce_eager",
    # Kernel choices of the draft, part of the backend's own key.
    "quantization", "moe_backend", "attention_backend", "kv_cache_dtype",
    "draft_lm_head_quantization", "use_local_argmax_reduction",
    # Data, not graph.
    "mask_token_id", "shared_vocab_size", "use_heterogeneous_vocab",
    # Lookup on the CPU.
    "prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
    # Prefix cache and verification happen outside the forward pass.
    "disable_eagle_block_drop", "disable_lookahead_block_hashes", "draft_sample_method",
    "rejection_sample_method", "acceptance_options",
    "acceptance_implementation", "acceptance_is_lossless",
    "synthetic_acceptance_rates", "synthetic_acceptance_length",
    "fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k",
})  # fmt: skip

# Model fields that do not shape the draft's graph.
_MODEL_IGNORED = {
    "tokenizer", "tokenizer_revision", "hf_overrides", "eos_token_ids", "bos_token_id",
}  # fmt: skip


def _model_factors(model: ModelConfig) -> dict[str, Any]:
    return model.model_dump(mode="json", exclude=_MODEL_IGNORED)


def graph_factors(spec: SpeculativeConfig) -> dict[str, Any]:
    """Named factors; names keep two different settings from colliding."""
    draft = spec.draft_model_config
    return {
        "uses_aux_hidden_states": spec.speculator.uses_aux_hidden_states,
        "draft_model": _model_factors(draft) if draft is not None else None,
        "aux_hidden_state_layer_ids": spec.aux_hidden_state_layer_ids,
        "custom_method": spec.custom_method,
        "speculator_options": sorted((spec.speculator_options or {}).items()),
        "method_factors": dict(sorted(spec.speculator.hash_factors.items())),
    }


def graph_hash(spec: SpeculativeConfig) -> str:
    """SHA-256 over the factors; equal in every process and for any order of keys."""
    text = json.dumps(graph_factors(spec), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
