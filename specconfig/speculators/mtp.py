"""Multi-token prediction: extra layers shipped inside (or beside) the target checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specconfig.errors import ConfigError
from specconfig.facts.model_facts import is_moe
from specconfig.formats.mtp_families import (
    MTP_MODEL_TYPES,
    TARGETS_WITHOUT_MTP,
    TRAINED_FOR_REPEATS,
)
from specconfig.model import text_section
from specconfig.speculators.base import SpeculatorConfig
from specconfig.speculators.eagle import EagleSpeculatorConfig, architecture_of, check_head_dtype
from specconfig.speculators.resolution import Resolution

_FIELD = "speculative_config.num_speculative_tokens"


class MTPSpeculatorConfig(EagleSpeculatorConfig):
    """One prediction module, re-run for each further draft token."""

    base_method = "mtp"
    variant = "mtp"
    implementation = "actors.draft.drafters.mtp:MtpDrafter"
    supported_options = frozenset({"draft_lm_head_quantization", "index_share_for_mtp_iteration"})

    @classmethod
    def matches(cls, path: str, hf: Mapping[str, Any]) -> bool:
        """The rewritten model_type is an MTP type."""
        return hf.get("model_type") in MTP_MODEL_TYPES

    @classmethod
    def default_model(cls, res: Resolution) -> str | None:
        """The target's own weights, where the modules usually are."""
        return default_to_target(res)

    @classmethod
    def adapt(cls, res: Resolution, hf: dict[str, Any]) -> None:
        """Settle the module's architecture and the switches it shares with the target."""
        target = res.require_target()
        if target.model_type in TARGETS_WITHOUT_MTP:
            raise ConfigError(
                "speculative_config.method",
                "mtp",
                f"'dspark' for a {target.model_type} target",
                "use method: dspark",
                message=f"method 'mtp' cannot draft for {target.model_type}",
            )
        if hf.get("model_type") not in MTP_MODEL_TYPES:
            _transformers_mtp(res, hf)
        share = res.values["index_share_for_mtp_iteration"]
        if share is not None:
            hf["index_share_for_mtp_iteration"] = share
        wanted = res.values["num_speculative_tokens"]
        if architecture_of(hf) == "ParseAuxMTPModel" and wanted not in (None, 1):
            raise ConfigError(
                _FIELD, wanted, "1 for a ParseAuxMTPModel", "set num_speculative_tokens: 1"
            )

    @classmethod
    def specialize(cls, res: Resolution) -> type[SpeculatorConfig]:
        """Gemma-4's KV-sharing module, several modules, or one."""
        assert res.draft is not None
        if res.draft.model_type == "gemma4_mtp":
            return Gemma4MTPSpeculatorConfig
        modules = _num_modules(res.draft.hf_config)
        if min(modules, res.values["num_speculative_tokens"]) > 1:
            return MultiModuleMTPSpeculatorConfig
        return cls

    @classmethod
    def check(cls, res: Resolution) -> None:
        """Warn when one module must predict further than it was trained to."""
        check_head_dtype(res)
        assert res.draft is not None
        k, modules = res.values["num_speculative_tokens"], _num_modules(res.draft.hf_config)
        if k > modules and res.draft.model_type not in TRAINED_FOR_REPEATS:
            res.log.warn(
                f"num_speculative_tokens={k} runs the same MTP layer again past its {modules} "
                "module(s); acceptance drops with each repeat"
            )

    @property
    def num_draft_kv_layers(self) -> int:
        """Layers of one module."""
        draft = self.spec.draft_model_config
        hf = draft.hf_config if draft else {}
        if "num_nextn_predict_layers" in text_section(hf):
            return 1
        return max(1, int(hf.get("n_predict") or 1))


class MultiModuleMTPSpeculatorConfig(MTPSpeculatorConfig):
    """Several modules, each one token further than the one before."""

    variant = "mtp multi-module"
    implementation = "actors.draft.drafters.mtp:MultiModuleMtpDrafter"

    @property
    def num_prefill_lookahead_tokens(self) -> int:
        """Module i reads i tokens ahead."""
        return self.spec.num_speculative_tokens

    @property
    def num_draft_kv_layers(self) -> int:
        """One layer per module in use."""
        draft = self.spec.draft_model_config
        modules = _num_modules(draft.hf_config) if draft else 1
        return min(modules, self.spec.num_speculative_tokens)


class Gemma4MTPSpeculatorConfig(MTPSpeculatorConfig):
    """Assistant whose queries read the target's KV; it writes none and shares no head."""

    variant = "mtp gemma4"
    implementation = "actors.draft.drafters.mtp:Gemma4MtpDrafter"
    supported_options = frozenset({"index_share_for_mtp_iteration"})

    @property
    def num_draft_kv_layers(self) -> int:
        """No KV of its own."""
        return 0


def default_to_target(res: Resolution) -> str:
    """The target's original weights; the draft then inherits their quantisation."""
    target = res.require_target()
    if not res.values["quantization"]:
        res.values["quantization"] = target.quantization
    return target.model_weights or target.model


def _num_modules(hf: Mapping[str, Any]) -> int:
    found = hf.get("num_nextn_predict_layers", text_section(hf).get("num_nextn_predict_layers"))
    return int(found or 1)


def _transformers_mtp(res: Resolution, hf: dict[str, Any]) -> None:
    """Targets that transformers itself runs with `num_mtp_layers`."""
    model = res.values["model"]
    layers = hf.get("num_mtp_layers")
    if not layers:
        raise ConfigError(
            "speculative_config.model",
            model,
            "a checkpoint with multi-token-prediction layers",
            "choose another method, or a checkpoint that declares MTP layers",
            message=f"method 'mtp' does not fit {model!r}: model_type "
            f"{hf.get('model_type')!r} declares no MTP layers",
        )
    if text_section(hf) is not hf:
        raise ConfigError(
            "speculative_config.method",
            "mtp",
            "a text-only model for num_mtp_layers",
            "use another method for multimodal targets",
        )
    hf["architectures"] = ["TransformersMoEForMTP" if is_moe(hf) else "TransformersForMTP"]
    hf["n_predict"] = int(layers)
