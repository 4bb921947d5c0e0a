"""``EngineConfig``: the whole resolved plan, and the one place its consumers read from."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import Field

from specconfig.acceptance import EXACT_MATCH
from specconfig.decisions import Decision
from specconfig.draft_law import DraftLaw
from specconfig.dynamic_k import tokens_for_batch
from specconfig.model import (
    CacheConfig,
    Frozen,
    ModelConfig,
    ParallelConfig,
    RuntimeConfig,
    SchedulerConfig,
)
from specconfig.speculative import SpeculativeConfig
from specconfig.speculators.base import Host


class EngineConfig(Frozen):
    """Frozen plan every process of one engine holds.

    Consumers read the properties below and never derive them from a method's name, so that
    scheduler, KV code and warm-up cannot drift apart. Without speculation they are 0, None or
    False.
    """

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    runtime: RuntimeConfig
    speculative: SpeculativeConfig | None = None
    decisions: tuple[Decision, ...] = Field(
        default=(), description="How values came to be; not part of the digest."
    )
    warnings: tuple[str, ...] = Field(
        default=(), description="Legal settings worth a look; not part of the digest."
    )

    # Lookahead and budgets -----------------------------------------------------------------

    @property
    def num_speculative_tokens(self) -> int:
        """K as configured; the largest any step uses."""
        return self.speculative.num_speculative_tokens if self.speculative else 0

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots a request needs past its scheduled tokens."""
        return self.speculative.speculator.num_lookahead_tokens if self.speculative else 0

    @property
    def num_hash_lookahead_tokens(self) -> int:
        """Tokens past a KV block that its prefix hash must cover; 0 = plain hashes."""
        spec = self.speculative
        if spec is None or not spec.use_eagle_block_drop:
            return 0
        if spec.disable_lookahead_block_hashes or not self.cache.enable_prefix_caching:
            return 0
        return spec.speculator.num_prefill_lookahead_tokens

    @property
    def use_block_drop(self) -> bool:
        """Drop the tail KV block of a prefix hit. False once hashes cover what the drafter read."""
        spec = self.speculative
        return bool(spec and spec.use_eagle_block_drop and not self.num_hash_lookahead_tokens)

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """Input rows per request that the drafter adds."""
        return self.speculative.speculator.max_num_new_slots_for_drafting if self.speculative else 0

    @property
    def max_model_len(self) -> int:
        """Longest sequence served. A draft with positions of its own caps it, unless the user
        limited the draft, which then just stops drafting (see ``draft_max_model_len``)."""
        limit, spec = self.model.max_model_len, self.speculative
        if spec is None or spec.draft_length_is_given or not self._loads_draft:
            return limit
        assert spec.draft_model_config is not None
        if spec.draft_shares_target_positions:
            return limit
        return min(limit, spec.draft_model_config.max_model_len)

    @property
    def draft_max_model_len(self) -> int | None:
        """Drafting stops where a sequence reaches this length; None without a draft checkpoint."""
        spec = self.speculative
        if spec is None or not self._loads_draft:
            return None
        assert spec.draft_model_config is not None
        if spec.draft_shares_target_positions and not spec.draft_length_is_given:
            return self.max_model_len
        return min(self.max_model_len, spec.draft_model_config.max_model_len)

    @property
    def max_num_draft_seqs(self) -> int | None:
        """Requests that fit the drafter's own pass; None when it does not limit them."""
        spec = self.speculative
        if spec is None or not spec.speculator.caps_active_requests:
            return None
        return max(1, self.scheduler.max_num_batched_tokens // self.num_lookahead_tokens)

    @property
    def max_num_active_seqs(self) -> int:
        """Requests the scheduler may run together."""
        limit = self.max_num_draft_seqs
        seqs = self.scheduler.max_num_seqs
        return seqs if limit is None else min(seqs, limit)

    @property
    def draft_law(self) -> DraftLaw | None:
        """What scheduler, commit path and prefix index must know of the drafter."""
        if self.speculative is None:
            return None
        drafter = self.speculative.speculator
        keeps_kv = drafter.keeps_kv
        depends = keeps_kv and drafter.needs_eagle_block_drop
        next_tokens = drafter.num_prefill_lookahead_tokens if depends else 0
        return DraftLaw(
            proposes=drafter.proposes_draft_tokens,
            arrives_in_step=drafter.host != "verifier",
            reads_target_states=drafter.uses_target_hidden_states or drafter.uses_aux_hidden_states,
            keeps_kv=keeps_kv,
            num_next_tokens=next_tokens,
            kv_survives_drafting=keeps_kv and drafter.kv_survives_drafting,
            num_hash_lookahead_tokens=self.num_hash_lookahead_tokens if keeps_kv else 0,
            drops_tail_block=keeps_kv and self.use_block_drop,
            num_lookahead_tokens=self.num_lookahead_tokens,
            num_extra_rows=self.max_num_new_slots_for_drafting,
            max_num_active_seqs=self.max_num_draft_seqs,
        )

    def num_speculative_tokens_for_batch(self, num_scheduled_requests: int) -> int:
        """K of a step with this many scheduled requests."""
        spec = self.speculative
        if spec is None:
            return 0
        table = spec.num_speculative_tokens_per_batch_size
        if table is None:
            return spec.num_speculative_tokens
        return tokens_for_batch(table, max(1, num_scheduled_requests), spec.num_speculative_tokens)

    @property
    def follows_goodput(self) -> bool:
        """Whether each request gets, up to that K, as many drafts as pay."""
        spec = self.speculative
        return spec is not None and spec.num_speculative_tokens_schedule == "goodput"

    # Drafter ---------------------------------------------------------------------------------

    @property
    def _loads_draft(self) -> bool:
        return bool(self.speculative and self.speculative.speculator.loads_draft_checkpoint)

    @property
    def drafter_host(self) -> Host | None:
        """Process that runs the drafter."""
        return self.speculative.speculator.host if self.speculative else None

    @property
    def drafter_implementation(self) -> str | None:
        """``module:Class`` of the drafter; the launcher imports it and refuses what is missing."""
        return self.speculative.speculator.implementation if self.speculative else None

    @property
    def draft_placement(self) -> Literal["fused", "colocated", "dedicated"] | None:
        """Processes of a separate draft model."""
        return self.speculative.draft_placement if self.speculative else None

    @property
    def draft_model(self) -> ModelConfig | None:
        """Model of a checkpoint drafter; None for lookup drafters."""
        return (
            self.speculative.draft_model_config if self.speculative and self._loads_draft else None
        )

    @property
    def draft_parallel(self) -> ParallelConfig | None:
        """Layout of a checkpoint drafter's ranks; None for lookup drafters."""
        spec = self.speculative
        return spec.draft_parallel_config if spec and self._loads_draft else None

    @property
    def draft_has_own_kv(self) -> bool:
        """Whether KV blocks carry draft layers too."""
        return bool(self.speculative and self.speculative.speculator.num_draft_kv_layers)

    @property
    def uses_aux_hidden_states(self) -> bool:
        """Whether it reads intermediate layers, not only the last state."""
        return bool(self.speculative and self.speculative.speculator.taps_aux_layers)

    @property
    def uses_last_hidden_state(self) -> bool:
        """Whether the drafter reads the state behind the target's final norm."""
        law = self.draft_law
        return law is not None and law.reads_target_states and not self.uses_aux_hidden_states

    @property
    def aux_hidden_state_layer_ids(self) -> tuple[int, ...] | None:
        """Residual streams to tap, ascending; None when the drafter needs none."""
        if self.speculative is None or not self.uses_aux_hidden_states:
            return None
        ids = self.speculative.aux_hidden_state_layer_ids
        if ids is not None:
            return ids
        layers = self.model.num_hidden_layers
        return tuple(sorted({min(2, layers), layers // 2, max(0, layers - 3)}))

    @property
    def acceptance_implementation(self) -> str:
        """``module:name`` of the acceptance rule, imported by the engine.

        Exact match without speculation: a request without drafts takes the target's own sample.
        """
        spec = self.speculative
        return spec.acceptance_implementation if spec else EXACT_MATCH.implementation

    @property
    def acceptance_options(self) -> dict[str, Any]:
        """Keyword arguments of the acceptance rule."""
        return self.speculative.resolved_acceptance_options if self.speculative else {}

    @property
    def is_lossless(self) -> bool:
        """Whether outputs follow exactly the target's distribution (True without speculation)."""
        return self.speculative is None or self.speculative.is_lossless

    # Memory ------------------------------------------------------------------------------------

    @property
    def target_kv_bytes_per_token(self) -> int:
        """Target KV of one token over all ranks together, bytes."""
        return self.model.kv_bytes_per_token()

    @property
    def draft_kv_bytes_per_token(self) -> int:
        """Draft KV of one token over all ranks together, bytes; 0 without draft KV."""
        spec, draft = self.speculative, self.draft_model
        if spec is None or draft is None:
            return 0
        return draft.kv_bytes_per_token(spec.speculator.num_draft_kv_layers, spec.kv_cache_dtype)

    # Identity ----------------------------------------------------------------------------------

    def compute_hash(self) -> str:
        """SHA-256 of the plan, for comparing processes; explanations are left out."""
        plan = self._plan(exclude={"decisions", "warnings"})
        text = json.dumps(plan, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """Everything as JSON; ``from_json`` gives an equal config without reading any file."""
        return json.dumps(self._plan(exclude=set()), sort_keys=True)

    def _plan(self, exclude: set[str]) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude=exclude)

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        """Inverse of ``to_json``."""
        return cls.model_validate(json.loads(text))
