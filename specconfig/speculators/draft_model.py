"""A separate language model as drafter: autoregressive, or parallel (PARD)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specconfig.errors import ConfigError
from specconfig.speculators.base import SpeculatorConfig
from specconfig.speculators.draft_config import build_draft
from specconfig.speculators.resolution import Resolution


class CheckpointSpeculatorConfig(SpeculatorConfig):
    """Shared by every method whose drafter has a checkpoint of its own."""

    loads_draft_checkpoint: ClassVar[bool] = True
    own_options = frozenset(
        {
            "model",
            "draft_tensor_parallel_size",
            "draft_load_config",
            "revision",
            "code_revision",
            "max_model_len",
            "enforce_eager",
            "quantization",
            "moe_backend",
            "attention_backend",
            "kv_cache_dtype",
            "use_local_argmax_reduction",
            "disable_padded_drafter_batch",
        }
    )
    produces_draft_probabilities: ClassVar[bool] = True
    supports_adaptive_verification: ClassVar[bool] = True
    may_share_target_positions: ClassVar[bool] = True

    @classmethod
    def default_model(cls, res: Resolution) -> str | None:
        """These have no default: the user must name the weights."""
        raise ConfigError(
            "speculative_config.model",
            None,
            f"a directory or hub id with a {cls.base_method} checkpoint",
            "set model",
            message="num_speculative_tokens was provided without a speculative model",
        )

    tokens_repeat_modules: ClassVar[bool] = True
    """K beyond the checkpoint's own count re-runs its modules, so K must be a multiple of it."""

    @classmethod
    def adapt(cls, res: Resolution, hf: dict[str, Any]) -> None:
        """Rewrite the draft's config in place for this method, before sizes are read."""

    @classmethod
    def checkpoint_tokens(cls, hf: Mapping[str, Any]) -> tuple[int | None, str]:
        """K the checkpoint declares, and the key that says so."""
        value = hf.get("n_predict")
        return (int(value), "n_predict of the draft checkpoint") if value else (None, "n_predict")

    @classmethod
    def configure(cls, res: Resolution) -> None:
        """Derive the draft's ModelConfig, K and parallel layout."""
        res.reset_lookup()
        build_draft(res, cls)

    @property
    def num_draft_kv_layers(self) -> int:
        """All layers of the draft checkpoint."""
        draft = self.spec.draft_model_config
        return draft.kv_layers if draft is not None else 0

    @property
    def num_lookahead_tokens(self) -> int:
        """One KV slot per draft token."""
        return self.spec.num_speculative_tokens


class StandaloneARSpeculatorConfig(CheckpointSpeculatorConfig):
    """An independent autoregressive model with its own KV in the target's block ids."""

    base_method = "draft_model"
    variant = "draft_model"
    implementation = "actors.draft.drafters.draft_model:DraftModelDrafter"
    host = "draft"
    draft_has_own_vocab: ClassVar[bool] = True
    kv_survives_drafting: ClassVar[bool] = True
    # Its positions are its own: a longer table would not make the model longer-sighted.
    may_share_target_positions: ClassVar[bool] = False
    supports_parallel_drafting: ClassVar[bool] = True

    @classmethod
    def specialize(cls, res: Resolution) -> type[SpeculatorConfig]:
        """PARD when one-pass drafting is on."""
        return PardSpeculatorConfig if res.values["parallel_drafting"] else cls

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """The newest token stays unsliced as the next step's input."""
        return 1


class PardSpeculatorConfig(StandaloneARSpeculatorConfig):
    """PARD: a draft model trained to fill K mask tokens in one pass."""

    variant = "pard"
    implementation = "actors.draft.drafters.pard:PardDrafter"
    # What drafting writes is KV of mask tokens.
    kv_survives_drafting: ClassVar[bool] = False

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """No input moves, so every one of the K queries is a new row."""
        return self.spec.num_speculative_tokens
