"""Hidden-state extraction: taps the target for training data and proposes nothing."""

from __future__ import annotations

import copy
from typing import ClassVar

from specconfig.errors import ConfigError
from specconfig.speculators.base import SpeculatorConfig
from specconfig.speculators.resolution import Resolution

_P = "speculative_config"
_IDS = "eagle_aux_hidden_state_layer_ids"


class HiddenStatesSpeculatorConfig(SpeculatorConfig):
    """Not a way to go faster: every step hands the tapped layers to a sink."""

    base_method = "extract_hidden_states"
    variant = "extract_hidden_states"
    implementation = "actors.draft.drafters.extract_hidden_states:HiddenStateExtractor"
    host = "target"
    uses_aux_hidden_states: ClassVar[bool] = True
    proposes_draft_tokens: ClassVar[bool] = False
    prefers_whole_prompts: ClassVar[bool] = True

    @classmethod
    def configure(cls, res: Resolution) -> None:
        """A copy of the target's config with the layers to tap."""
        target = res.require_target()
        res.reset_lookup()
        k = res.values["num_speculative_tokens"]
        if k is None:
            res.values["num_speculative_tokens"] = 1
        elif k != 1:
            raise ConfigError(
                f"{_P}.num_speculative_tokens",
                k,
                "1: extraction proposes no tokens",
                "set num_speculative_tokens: 1",
            )
        user = (res.options.draft_model_config or {}).get("hf_config") or {}
        ids = user.get(_IDS)
        if not ids:
            raise ConfigError(
                f"{_P}.draft_model_config.hf_config.{_IDS}",
                ids,
                "a non-empty list of layer ids",
                f"set draft_model_config: {{hf_config: {{{_IDS}: [2, 15, 27]}}}}",
            )
        hf = copy.deepcopy(target.hf_config)
        hf.update(copy.deepcopy(user))
        hf["architectures"] = ["ExtractHiddenStatesModel"]
        res.values["model"] = None
        res.draft_hf = hf
        res.draft = target.model_copy(
            update={"hf_config": hf, "architecture": "ExtractHiddenStatesModel"}
        )
        res.draft_parallel = res.parallel

    @property
    def keeps_kv(self) -> bool:
        """Its states are kept by KV block, so that a prefix hit has them too."""
        return True
