"""DFlash and its refinements: a block of mask tokens filled in one non-causal pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specconfig.errors import ConfigError
from specconfig.speculators.base import SpeculatorConfig
from specconfig.speculators.draft_model import CheckpointSpeculatorConfig
from specconfig.speculators.eagle import (
    architecture_of,
    check_head_vocab,
    check_target_width,
    inherit_missing,
    wrap_head,
)
from specconfig.speculators.resolution import Resolution

_MUSE_GLIMMER = "MuseGlimmerAssistantModel"
_CANDIDATE_HEADS = ("DFlash2DraftModel", "DFlash2BeamDraftModel")
_UNWRAPPED = ("LiLiCorrDraftModel",)


def draft_vocab(hf: Mapping[str, Any]) -> int:
    """Rows of the draft's output head."""
    return int(hf.get("draft_vocab_size") or hf.get("vocab_size") or 0)


class DFlashSpeculatorConfig(CheckpointSpeculatorConfig):
    """Block-parallel drafter over intermediate layers of the target."""

    base_method = "dflash"
    variant = "dflash"
    implementation = "actors.draft.drafters.dflash:DFlashDrafter"
    host = "target"
    uses_target_hidden_states: ClassVar[bool] = True
    uses_aux_hidden_states: ClassVar[bool] = True
    supports_parallel_drafting: ClassVar[bool] = True

    @classmethod
    def matches(cls, path: str, hf: Mapping[str, Any]) -> bool:
        """'dflash' in the path, or an architecture of the family."""
        arch = architecture_of(hf)
        return "dflash" in path or arch.startswith("DFlash") or arch in (_MUSE_GLIMMER, *_UNWRAPPED)

    @classmethod
    def adapt(cls, res: Resolution, hf: dict[str, Any]) -> None:
        """Wrap a bare config, and draft in parallel always."""
        force_parallel(res, cls.variant)
        arch = architecture_of(hf)
        if arch == _MUSE_GLIMMER:
            hf.setdefault("dflash_config", {}).setdefault("causal", False)
            hf.setdefault("vocab_size", 202048)
        inherit_missing(hf, res, ("vocab_size",))
        if hf.get("model_type") not in ("eagle", "speculators"):
            marked = arch.startswith("DFlash") or arch.endswith("DFlash")
            kept = marked or arch in _UNWRAPPED or "XPress" in arch
            wrap_head(hf, arch if kept else f"DFlash{arch}")

    @classmethod
    def specialize(cls, res: Resolution) -> type[SpeculatorConfig]:
        """XPress, LiLiCorr or candidate-head variants, by architecture."""
        assert res.draft is not None
        arch = res.draft.architecture
        if "XPress" in arch:
            return XPressSpeculatorConfig
        if arch in _UNWRAPPED:
            return LiLiCorrSpeculatorConfig
        return DFlash2SpeculatorConfig if arch in _CANDIDATE_HEADS else cls

    @classmethod
    def check(cls, res: Resolution) -> None:
        """Blocks have a trained length, and these drafters never sample from the anchor."""
        assert res.draft is not None
        check_head_vocab(res)
        check_target_width(res)
        hf = res.draft.hf_config
        section = hf.get("dflash_config") or {}
        if section.get("sample_from_anchor", hf.get("sample_from_anchor")):
            raise ConfigError(
                "speculative_config.model",
                res.draft.model,
                "a dflash checkpoint with sample_from_anchor false",
                "retrain or re-export it with sample_from_anchor: false",
                message="sample_from_anchor=true is not a DFlash layout",
            )
        limit_to_block(res, hf.get("block_size"), 1)

    @property
    def num_lookahead_tokens(self) -> int:
        """K masks behind the bonus token."""
        return self.spec.num_speculative_tokens + 1

    @property
    def caps_active_requests(self) -> bool:
        """Each request occupies a query block of the drafter's own pass."""
        return True


class DFlash2SpeculatorConfig(DFlashSpeculatorConfig):
    """Adds local convolutions and a pairwise candidate selector."""

    variant = "dflash2"
    implementation = "actors.draft.drafters.dflash:DFlash2Drafter"


class LiLiCorrSpeculatorConfig(DFlashSpeculatorConfig):
    """Adds a light linear correction over candidates."""

    variant = "lilicorr"
    implementation = "actors.draft.drafters.dflash:LiLiCorrDrafter"


class XPressSpeculatorConfig(DFlashSpeculatorConfig):
    """Iterates over a few candidates per position."""

    variant = "xpress"
    implementation = "actors.draft.drafters.dflash:XPressDrafter"
    supported_options = frozenset({"xpress_topc"})
    produces_draft_probabilities: ClassVar[bool] = False

    @classmethod
    def check(cls, res: Resolution) -> None:
        """As DFlash, and the candidate count fits the vocabulary."""
        super().check(res)
        settle_candidates(res, "xpress_topc", least=0)


def force_parallel(res: Resolution, variant: str) -> None:
    """One-pass drafting is what these methods are, whatever the field says."""
    if "parallel_drafting" in res.given and not res.options.parallel_drafting:
        res.log.warn(f"parallel_drafting=false has no effect: {variant} always drafts in parallel")
    res.values["parallel_drafting"] = True


def limit_to_block(res: Resolution, block_size: object, reserved: int) -> None:
    """K must fit the draft block the checkpoint was trained on."""
    if not isinstance(block_size, int):
        return
    k, most = res.values["num_speculative_tokens"], block_size - reserved
    if k > most:
        raise ConfigError(
            "speculative_config.num_speculative_tokens",
            k,
            f"at most {most} (block_size {block_size} of the draft checkpoint)",
            f"use {most} or less",
        )


def settle_candidates(res: Resolution, name: str, least: int) -> None:
    """User's or checkpoint's candidate count, range-checked, written into the draft config."""
    assert res.draft is not None
    hf = res.draft.hf_config
    value = res.values[name]
    value = hf.get(name) if value is None else value
    if value is None:
        return
    most = draft_vocab(hf)
    if not least <= int(value) <= most:
        raise ConfigError(
            f"speculative_config.{name}",
            value,
            f"{least} to the draft vocabulary's {most}",
            f"use a value in [{least}, {most}]",
        )
    hf[name] = int(value)
    res.values[name] = int(value)
