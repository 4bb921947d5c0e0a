"""Medusa: one residual head per position, all over the target's last hidden state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specconfig.errors import ConfigError
from specconfig.speculators.draft_model import CheckpointSpeculatorConfig
from specconfig.speculators.eagle import (
    architecture_of,
    check_head_vocab,
    check_target_width,
    inherit_missing,
)
from specconfig.speculators.resolution import Resolution

_HEAD_KEYS = ("medusa_num_heads", "num_heads")


class MedusaSpeculatorConfig(CheckpointSpeculatorConfig):
    """Parallel heads; no draft KV and no lookahead, since a head only reads one hidden state."""

    base_method = "medusa"
    variant = "medusa"
    implementation = "actors.draft.drafters.medusa:MedusaDrafter"
    host = "target"
    uses_target_hidden_states: ClassVar[bool] = True
    tokens_repeat_modules: ClassVar[bool] = False

    @classmethod
    def matches(cls, path: str, hf: Mapping[str, Any]) -> bool:
        """'medusa' in path, architecture or model_type, or Medusa's own keys."""
        marked = (path, architecture_of(hf).lower(), str(hf.get("model_type")))
        return "medusa_num_heads" in hf or any("medusa" in text for text in marked)

    @classmethod
    def adapt(cls, res: Resolution, hf: dict[str, Any]) -> None:
        """Complete the tiny config such checkpoints ship with."""
        inherit_missing(
            hf,
            res,
            ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        )
        hf["architectures"] = [architecture_of(hf) or "MedusaModel"]
        hf["model_type"] = "medusa"
        hf.setdefault("num_hidden_layers", 0)

    @classmethod
    def checkpoint_tokens(cls, hf: Mapping[str, Any]) -> tuple[int | None, str]:
        """One draft token per trained head."""
        for key in _HEAD_KEYS:
            if hf.get(key):
                return int(hf[key]), f"{key} of the draft checkpoint"
        return None, "medusa_num_heads"

    @classmethod
    def check(cls, res: Resolution) -> None:
        """No more tokens than heads."""
        assert res.draft is not None
        check_head_vocab(res)
        check_target_width(res)
        k = res.values["num_speculative_tokens"]
        heads, origin = cls.checkpoint_tokens(res.draft.hf_config)
        if heads is not None and k > heads:
            raise ConfigError(
                "speculative_config.num_speculative_tokens",
                k,
                f"at most {heads} ({origin})",
                f"use {heads} or less",
            )

    @property
    def num_lookahead_tokens(self) -> int:
        """Heads write no KV."""
        return 0

    @property
    def num_prefill_lookahead_tokens(self) -> int:
        """A head reads its own position only, never the next token."""
        return 0

    @property
    def num_draft_kv_layers(self) -> int:
        """No KV."""
        return 0
