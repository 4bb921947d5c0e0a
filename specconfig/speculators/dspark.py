"""DSpark: a parallel draft block with a sequential head and a confidence head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specconfig.errors import ConfigError
from specconfig.speculators.base import SpeculatorConfig
from specconfig.speculators.dflash import (
    DFlashSpeculatorConfig,
    force_parallel,
    limit_to_block,
    settle_candidates,
)
from specconfig.speculators.dspark_omni import check_contract
from specconfig.speculators.eagle import (
    architecture_of,
    check_head_vocab,
    check_target_width,
    inherit_missing,
)
from specconfig.speculators.mtp import default_to_target
from specconfig.speculators.resolution import Resolution

TOPK_ARCHITECTURES = ("Qwen3DSparkModel", "Qwen3OmniDSparkModel")
_NATIVE = (*TOPK_ARCHITECTURES, "MuseSparkDSparkModel", "Gemma4DSparkModel", "K3DSparkModel")
_IN_CHECKPOINT = {"deepseek_v4": "DSparkDraftModel", "deepseek_v41": "DSparkV41DraftModel"}


class DSparkSpeculatorConfig(DFlashSpeculatorConfig):
    """Semi-parallel drafter with its own workspace and a trained acceptance estimate."""

    base_method = "dspark"
    variant = "dspark"
    implementation = "actors.draft.drafters.dspark:DSparkDrafter"
    supported_options = frozenset({"dspark_draft_topk"})
    adaptive_verification_uses_draft_logits: ClassVar[bool] = False
    tokens_repeat_modules: ClassVar[bool] = False

    @classmethod
    def matches(cls, path: str, hf: Mapping[str, Any]) -> bool:
        """'dspark' in the path, or an architecture of the family."""
        return "dspark" in path or "DSpark" in architecture_of(hf)

    @classmethod
    def default_model(cls, res: Resolution) -> str | None:
        """DeepSeek V4 ships its DSpark layers inside the target checkpoint."""
        target = res.require_target()
        if target.model_type in _IN_CHECKPOINT:
            return default_to_target(res)
        return super().default_model(res)

    @classmethod
    def adapt(cls, res: Resolution, hf: dict[str, Any]) -> None:
        """Settle the architecture; refuse checkpoints that are no DSpark drafter."""
        force_parallel(res, cls.variant)
        inherit_missing(hf, res, ("vocab_size",))
        arch, kind = architecture_of(hf), hf.get("model_type")
        if arch == "DSparkDraftModel" and kind == "qwen3":
            arch = "Qwen3DSparkModel"
        elif arch not in _NATIVE and kind != "speculators":
            arch = cls._in_checkpoint(res, hf)
        hf["architectures"] = [arch]
        if arch == "Gemma4DSparkModel" and "target_layer_ids" in hf:
            hf.setdefault("dspark_target_layer_ids", list(hf["target_layer_ids"]))

    @classmethod
    def _in_checkpoint(cls, res: Resolution, hf: dict[str, Any]) -> str:
        target, model = res.require_target(), res.values["model"]
        if target.model_type not in _IN_CHECKPOINT or hf.get("model_type") not in _IN_CHECKPOINT:
            raise ConfigError(
                "speculative_config.model",
                model,
                f"a DSpark checkpoint ({', '.join(_NATIVE)})",
                "point model at a DSpark drafter, or use another method",
                message=f"{model!r} ({architecture_of(hf)}) is not a DSpark drafter",
            )
        hf["model_type"] = target.model_type
        res.values["quantization"] = res.values["quantization"] or target.quantization
        return _IN_CHECKPOINT[target.model_type]

    @classmethod
    def checkpoint_tokens(cls, hf: Mapping[str, Any]) -> tuple[int | None, str]:
        """The trained block length."""
        for key in ("block_size", "dspark_block_size"):
            if hf.get(key):
                return int(hf[key]), f"{key} of the draft checkpoint"
        return None, "block_size"

    @classmethod
    def specialize(cls, res: Resolution) -> type[SpeculatorConfig]:
        """One class for all DSpark checkpoints."""
        return cls

    @classmethod
    def check(cls, res: Resolution) -> None:
        """Candidate restriction and the Qwen3-Omni contract."""
        assert res.draft is not None
        target, draft = res.require_target(), res.draft
        if target.model_type == "qwen3_omni_moe":
            check_contract(target, draft, res.values["num_speculative_tokens"])
        elif draft.model_type not in _IN_CHECKPOINT:
            check_head_vocab(res)
            check_target_width(res)
        limit_to_block(res, cls.checkpoint_tokens(draft.hf_config)[0], 0)
        topk = res.values["dspark_draft_topk"]
        if topk is not None and draft.architecture not in TOPK_ARCHITECTURES:
            raise ConfigError(
                "speculative_config.dspark_draft_topk",
                topk,
                f"only with {' or '.join(TOPK_ARCHITECTURES)}, not {draft.architecture}",
                "remove dspark_draft_topk",
            )
        settle_candidates(res, "dspark_draft_topk", least=1)
        degree = res.values["draft_tensor_parallel_size"]
        if res.values["dspark_draft_topk"] is not None and degree > 1:
            raise ConfigError(
                "speculative_config.draft_tensor_parallel_size",
                degree,
                "1 with dspark_draft_topk: candidates are chosen over the whole vocabulary",
                "set draft_tensor_parallel_size: 1",
            )

    @property
    def samples_from_anchor(self) -> bool:
        """Whether the anchor position itself predicts the first draft token."""
        draft = self.spec.draft_model_config
        return draft is None or draft.hf_config.get("sample_from_anchor", True) is not False

    @property
    def num_lookahead_tokens(self) -> int:
        """K when the anchor predicts, K + 1 when every draft is filled in behind it."""
        return self.spec.num_speculative_tokens + (0 if self.samples_from_anchor else 1)
