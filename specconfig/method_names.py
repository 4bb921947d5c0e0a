"""Names of the built-in drafting methods, their aliases, and where each is configured."""

from __future__ import annotations

_PACKAGE = "specconfig.speculators"
CONFIG_BY_METHOD: dict[str, str] = {
    "ngram": f"{_PACKAGE}.ngram:NgramSpeculatorConfig",
    "ngram_gpu": f"{_PACKAGE}.ngram:NgramGPUSpeculatorConfig",
    "suffix": f"{_PACKAGE}.suffix:SuffixSpeculatorConfig",
    "custom_class": f"{_PACKAGE}.custom:CustomClassSpeculatorConfig",
    "draft_model": f"{_PACKAGE}.draft_model:StandaloneARSpeculatorConfig",
    "eagle": f"{_PACKAGE}.eagle:EagleSpeculatorConfig",
    "eagle3": f"{_PACKAGE}.eagle:Eagle3SpeculatorConfig",
    "mtp": f"{_PACKAGE}.mtp:MTPSpeculatorConfig",
    "medusa": f"{_PACKAGE}.medusa:MedusaSpeculatorConfig",
    "dflash": f"{_PACKAGE}.dflash:DFlashSpeculatorConfig",
    "dspark": f"{_PACKAGE}.dspark:DSparkSpeculatorConfig",
    "extract_hidden_states": f"{_PACKAGE}.extract_hidden_states:HiddenStatesSpeculatorConfig",
}
"""Qualified names, so that importing this package imports no method."""

MTP_ALIASES = (
    "deepseek_mtp", "dots3_note_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp",
    "glm4_moe_lite_mtp", "glm_ocr_mtp", "ernie_mtp", "nemotron_h_mtp", "exaone_moe_mtp",
    "exaone4_5_mtp", "qwen3_next_mtp", "qwen4_exp_mtp", "qwen3_5_mtp", "longcat_flash_mtp",
    "bailing_hybrid_v3_mtp", "minimax_m3_mtp", "bailing_hybrid_mtp", "kimi_k3_mtp",
    "pangu_ultra_moe_mtp", "step3p5_mtp", "step5_mtp", "hy_v3_mtp", "hy_v4_mtp", "gemma4_mtp",
    "inkling_mtp", "glm5_next_mtp",
)  # fmt: skip
"""Model-specific spellings of `mtp`, accepted with a deprecation warning."""

PARALLEL_METHODS = {"pard": "draft_model", "peagle": "eagle3"}
"""First-class names of one-pass drafting: base method plus parallel_drafting."""

BUILTIN_METHODS = frozenset({*CONFIG_BY_METHOD, *MTP_ALIASES, *PARALLEL_METHODS})
DETECTION_ORDER = ("eagle", "eagle3", "dflash", "dspark", "mtp", "medusa")
"""Order in which checkpoint detection asks the classes; the first match wins."""
