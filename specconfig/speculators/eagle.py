"""EAGLE, EAGLE-3 and P-EAGLE: heads that read the target's hidden states."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from specconfig.errors import ConfigError, FormatError
from specconfig.facts.tokenizer_facts import same_tokenizer
from specconfig.model import text_section
from specconfig.speculators.base import SpeculatorConfig
from specconfig.speculators.draft_model import CheckpointSpeculatorConfig
from specconfig.speculators.resolution import Resolution

# "eagle-3" and "eagle_3" are spellings of the third version.
_EAGLE_PATH = re.compile(r"eagle[-_](?!3)")
_EAGLE3_PATH = re.compile(r"eagle[-_]?3")
_MOST_HEAD_LAYERS = 4
_KEPT_MODEL_TYPES = ("eagle", "speculators")


def architecture_of(hf: Mapping[str, Any]) -> str:
    """First architecture, or ''."""
    return str((hf.get("architectures") or [""])[0])


def wrap_head(hf: dict[str, Any], architecture: str) -> None:
    """Mark a head's config as a draft of its family, keeping every attribute."""
    hf["architectures"] = [architecture]
    hf["model_type"] = "eagle"
    hf.setdefault("truncated_vocab_size", hf.get("vocab_size"))


def inherit_missing(hf: dict[str, Any], res: Resolution, keys: tuple[str, ...]) -> None:
    """Fill config keys that heads may leave out because they are the target's."""
    target = res.require_target()
    # Before class defaults: a head that says nothing means its target, not the class.
    text = text_section(hf)
    for key in keys:
        if text.get(key) is None:
            hf[key] = getattr(target, key)


class EagleSpeculatorConfig(CheckpointSpeculatorConfig):
    """One-layer head over (last hidden state, next token)."""

    base_method = "eagle"
    variant = "eagle"
    implementation = "actors.draft.drafters.eagle:EagleDrafter"
    host = "target"
    supported_options = frozenset({"draft_lm_head_quantization"})
    uses_target_hidden_states: ClassVar[bool] = True
    needs_eagle_block_drop: ClassVar[bool] = True

    @classmethod
    def matches(cls, path: str, hf: Mapping[str, Any]) -> bool:
        """'eagle-' or 'eagle_' in the path, or an Eagle architecture."""
        arch = architecture_of(hf)
        if arch.startswith("Eagle") and not arch.startswith("Eagle3"):
            return not arch.startswith("EagleMistralLarge3") or _EAGLE_PATH.search(path) is not None
        return _EAGLE_PATH.search(path) is not None

    @classmethod
    def adapt(cls, res: Resolution, hf: dict[str, Any]) -> None:
        """Wrap a bare head's config; refuse a whole language model."""
        inherit_missing(hf, res, ("vocab_size", "num_attention_heads"))
        cls.refuse_full_model(res, hf)
        if hf.get("model_type") not in _KEPT_MODEL_TYPES:
            wrap_head(hf, cls.head_architecture(architecture_of(hf)))

    @classmethod
    def head_architecture(cls, arch: str) -> str:
        """Architecture name of the head over a base architecture."""
        return arch if arch.startswith("Eagle") else f"Eagle{arch}"

    @classmethod
    def refuse_full_model(cls, res: Resolution, hf: Mapping[str, Any]) -> None:
        """A head has a few layers; a deep plain model under this method is a mistake."""
        model = str(res.values["model"])
        layers = int(text_section(hf).get("num_hidden_layers") or 0)
        marked = "eagle" in architecture_of(hf).lower() or "eagle_config" in hf
        marked = marked or hf.get("model_type") in _KEPT_MODEL_TYPES or "draft_vocab_size" in hf
        if marked or "eagle" in model.lower() or layers <= _MOST_HEAD_LAYERS:
            return
        raise ConfigError(
            "speculative_config.model",
            model,
            f"an {cls.base_method} head",
            "point model at the head, or use method: draft_model for a whole language model",
            message=f"{model!r} looks like a complete language model ({architecture_of(hf)}, "
            f"{layers} layers), not like an {cls.base_method} head",
        )

    @classmethod
    def check(cls, res: Resolution) -> None:
        """Head and target must fit; a quantised head copy must run in the model's dtype."""
        check_head_vocab(res)
        cls.check_width(res)
        check_head_dtype(res)

    @classmethod
    def check_width(cls, res: Resolution) -> None:
        """The head concatenates its embedding with the target's hidden state."""
        check_target_width(res)


class Eagle3SpeculatorConfig(EagleSpeculatorConfig):
    """Head over several intermediate layers, with an optional reduced vocabulary."""

    base_method = "eagle3"
    variant = "eagle3"
    implementation = "actors.draft.drafters.eagle3:Eagle3Drafter"
    uses_aux_hidden_states: ClassVar[bool] = True
    supports_parallel_drafting: ClassVar[bool] = True

    @classmethod
    def matches(cls, path: str, hf: Mapping[str, Any]) -> bool:
        """'eagle3' in the path, or an Eagle3 architecture."""
        arch = architecture_of(hf)
        return (
            _EAGLE3_PATH.search(path) is not None
            or arch.startswith(("Eagle3", "Peagle"))
            or arch.endswith("Eagle3")
        )

    @classmethod
    def head_architecture(cls, arch: str) -> str:
        """'Eagle3' in front, unless it is there or at the end."""
        marked = arch.startswith("Eagle3") or arch.endswith("Eagle3")
        return arch if marked else f"Eagle3{arch}"

    @classmethod
    def specialize(cls, res: Resolution) -> type[SpeculatorConfig]:
        """P-EAGLE when one-pass drafting is on."""
        return PEagleSpeculatorConfig if res.values["parallel_drafting"] else cls

    @property
    def taps_aux_layers(self) -> bool:
        """Unless the head was trained on the last hidden state alone."""
        draft = self.spec.draft_model_config
        section = (draft.hf_config.get("eagle_config") if draft else None) or {}
        return bool(section.get("use_aux_hidden_state", True))


class PEagleSpeculatorConfig(Eagle3SpeculatorConfig):
    """P-EAGLE: an EAGLE-3 head that fills K mask tokens in one pass."""

    variant = "peagle"
    implementation = "actors.draft.drafters.peagle:PEagleDrafter"

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """Only the masked queries are new rows; the first reuses the existing one."""
        return self.spec.num_speculative_tokens - 1


def check_head_vocab(res: Resolution) -> None:
    """A head embeds and scores the target's ids, so sizes must agree."""
    assert res.draft is not None
    target, draft = res.require_target(), res.draft
    res.shared_vocab_size = min(target.vocab_size, draft.vocab_size)
    if draft.vocab_size != target.vocab_size:
        shared = same_tokenizer(res.facts, target, draft)
        if shared is None or shared > res.shared_vocab_size:
            raise ConfigError(
                "speculative_config.model",
                draft.model,
                f"a head for a target with vocab_size {target.vocab_size}",
                "use the head that was trained for this target",
                message=f"target vocab_size {target.vocab_size} and head vocab_size "
                f"{draft.vocab_size} differ",
            )
        res.shared_vocab_size = shared
    reduced = draft.hf_config.get("draft_vocab_size")
    if reduced is not None and not 0 < int(reduced) <= target.vocab_size:
        raise FormatError(
            "draft_vocab_size",
            reduced,
            f"1 to the target's vocab_size {target.vocab_size}",
            "use the head that was trained for this target",
        )


def check_target_width(res: Resolution) -> None:
    """The hidden width a head was trained on must be the target's."""
    assert res.draft is not None
    target, draft = res.require_target(), res.draft
    expected = draft.hf_config.get("target_hidden_size") or draft.hidden_size
    if int(expected) != target.hidden_size:
        raise ConfigError(
            "speculative_config.model",
            draft.model,
            f"a head for a target with hidden_size {target.hidden_size}",
            "use the head that was trained for this target",
            message=f"head {draft.model!r} reads hidden states of width {expected}, the target's "
            f"are {target.hidden_size} wide",
        )


def check_head_dtype(res: Resolution) -> None:
    """Quantising a head that runs in another dtype would round twice."""
    wanted = res.values["draft_lm_head_quantization"]
    draft = res.draft
    if wanted is None or draft is None or draft.head_dtype in (None, draft.compute_dtype):
        return
    raise ConfigError(
        "speculative_config.draft_lm_head_quantization",
        wanted,
        f"only when the draft's lm_head runs in the model dtype {draft.compute_dtype}",
        "remove draft_lm_head_quantization",
        message=f"lm_head must run in model dtype {draft.compute_dtype}, got {draft.head_dtype}",
    )
