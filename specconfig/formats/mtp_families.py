"""How checkpoints with prediction modules become draft configs, as data.

``rewrite`` applies to every draft config, whatever the method: it turns a target's own config into
the config of its MTP module, and leaves everything else alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specconfig.errors import FormatError
from specconfig.facts.model_facts import is_moe
from specconfig.method_names import MTP_ALIASES

Hf = dict[str, Any]

MTP_MODEL_TYPES = frozenset({"mtp", *MTP_ALIASES})
TARGETS_WITHOUT_MTP = frozenset({"deepseek_v41"})
TRAINED_FOR_REPEATS = frozenset({"step3p5_mtp", "step5_mtp", "inkling_mtp"})
"""Draft types whose layer was trained to run several times."""

NEXTN = "num_nextn_predict_layers"


@dataclass(frozen=True)
class Family:
    """One row: which configs it takes and what they become.

    ``count`` names the key of the module count ('text.' prefix: inside text_config); ``default``
    is used when the key is missing (None = leave unknown). ``promote`` replaces a multimodal
    config by its language part first.
    """

    model_type: str
    architecture: str
    types: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    count: str = NEXTN
    default: int | None = None
    zero_layers: bool = False
    promote: bool = False
    extra: Callable[[Hf, int | None], None] | None = None


def _text(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    section = hf.get("text_config")
    return section if isinstance(section, Mapping) and section else hf


def _promote(hf: Hf) -> None:
    """Replace a multimodal config by its language part, keeping the quantisation."""
    text = hf.get("text_config")
    if not isinstance(text, Mapping) or not text:
        return
    quantization = hf.get("quantization_config")
    hf.clear()
    hf.update(text)
    if quantization is not None:
        hf.setdefault("quantization_config", quantization)


def _dots3(hf: Hf, count: int | None) -> None:
    modules = count or 1
    kinds = hf.get("mtp_layer_types") or ["sliding_attention"] * modules
    if len(kinds) != modules:
        raise FormatError(
            "mtp_layer_types",
            kinds,
            f"{modules} entries, one per module ({NEXTN})",
            "repair the draft's config.json",
        )
    hf["mtp_layer_types"] = list(kinds)
    hf["layer_types"] = [*hf.get("layer_types", []), *kinds]


def _deepseek(hf: Hf, count: int | None) -> None:
    del count
    hf["architectures"] = [
        "DeepseekV32MTPModel"
        if hf.pop("__from_type__") in ("deepseek_v32", "glm_moe_dsa")
        else "DeepSeekMTPModel"
    ]


def _mimo_v2(hf: Hf, count: int | None) -> None:
    hf[NEXTN] = count
    if hf.pop("__from_arch__", "") == "MiMoV2OmniForCausalLM":
        hf["architectures"] = ["MiMoV2OmniMTPModel"]


def _qwen4_exp(hf: Hf, count: int | None) -> None:
    del count
    text = _text(hf)
    if text.get("hc_count") is not None:
        hf["hc_mult"] = int(text["hc_count"])
    _copy_index_share(hf, None)


def _copy_index_share(hf: Hf, count: int | None) -> None:
    del count
    text = _text(hf)
    if "index_share_for_mtp_iteration" in text:
        hf["index_share_for_mtp_iteration"] = text["index_share_for_mtp_iteration"]


def _moe_name(dense: str, moe: str) -> Callable[[Hf, int | None], None]:
    def choose(hf: Hf, count: int | None) -> None:
        del count
        hf["architectures"] = [moe if is_moe(hf) else dense]

    return choose


def _inkling(hf: Hf, count: int | None) -> None:
    if not count or count < 1:
        raise FormatError(
            f"mtp_config.{NEXTN}",
            count,
            "at least 1",
            "use a checkpoint that has MTP weights",
            message="this checkpoint has no MTP weights",
        )
    section = hf.get("mtp_config") or {}
    for key in ("chain_hidden_post_norm", "local_layer_ids"):
        if key in section:
            hf[key] = section[key]


def _gemma4(hf: Hf, count: int | None) -> None:
    del count
    text = hf.get("text_config")
    (text if isinstance(text, dict) else hf)["num_kv_shared_layers"] = 0


FAMILIES: tuple[Family, ...] = (
    Family("dots3_note_mtp", "Dots3NoteMTPModel", ("dots3_note",), default=1, extra=_dots3),
    Family("deepseek_mtp", "DeepSeekMTPModel",
           ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "deepseek_mtp"), extra=_deepseek),
    Family("deepseek_mtp", "DeepSeekV4MTPModel", ("deepseek_v4",)),
    Family("pangu_ultra_moe_mtp", "OpenPanguMTPModel", ("pangu_ultra_moe",)),
    Family("kimi_k3_mtp", "KimiK3MTPModel", ("kimi_k3",), count=f"text.{NEXTN}"),
    Family("mimo_mtp", "MiMoMTPModel", architectures=("MiMoForCausalLM",), zero_layers=True),
    Family("mimo_v2_mtp", "MiMoV2MTPModel",
           architectures=("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2OmniForCausalLM"),
           count="=1", zero_layers=True, extra=_mimo_v2),
    Family("glm4_moe_mtp", "Glm4MoeMTPModel", architectures=("Glm4MoeForCausalLM",)),
    Family("glm4_moe_lite_mtp", "Glm4MoeLiteMTPModel", architectures=("Glm4MoeLiteForCausalLM",),
           zero_layers=True),
    Family("glm_ocr_mtp", "GlmOcrMTPModel", architectures=("GlmOcrForConditionalGeneration",),
           zero_layers=True, promote=True),
    Family("ernie_mtp", "ErnieMTPModel", ("ernie4_5_moe",)),
    Family("qwen3_next_mtp", "Qwen3NextMTP", ("qwen3_next",)),
    Family("qwen4_exp_mtp", "Qwen4ExpMTP", ("qwen4_exp", "qwen4_exp_text"),
           count="text.mtp_num_hidden_layers", extra=_qwen4_exp),
    Family("bailing_hybrid_v3_mtp", "BailingMoeV3MTPModel",
           architectures=("BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"),
           promote=True),
    Family("bailing_hybrid_mtp", "BailingMoeV25MTPModel", ("bailing_hybrid",),
           ("BailingMoeV2_5ForCausalLM",)),
    Family("exaone_moe_mtp", "ExaoneMoeMTP", ("exaone_moe",)),
    Family("exaone4_5_mtp", "Exaone4_5_MTP", ("exaone4_5", "exaone4_5_text")),
    Family("qwen3_5_mtp", "Qwen3_5MTP",
           ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
           count="mtp_num_hidden_layers", extra=_moe_name("Qwen3_5MTP", "Qwen3_5MoeMTP")),
    Family("qwen3_5_mtp", "Qwen3_5MTP", ("intern_s2_preview",),
           count="text.mtp_num_hidden_layers", extra=_moe_name("Qwen3_5MTP", "Qwen3_5MoeMTP")),
    Family("qwen3_5_mtp", "InternS2MobiusMTP", ("interns2_mobius",),
           count="text.mtp_num_hidden_layers"),
    Family("longcat_flash_mtp", "LongCatFlashMTPModel", ("longcat_flash",), default=1),
    Family("step3p5_mtp", "Step3p5MTP", ("step3p5", "step3p7"),
           ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"), default=1, promote=True),
    Family("step5_mtp", "Step5MTP", ("step5", "step5_vl"),
           ("Step5ForCausalLM", "Step5VLForConditionalGeneration"), default=1, promote=True),
    Family("hy_v3_mtp", "HYV3MTPModel", ("hy_v3",)),
    Family("hy_v4_mtp", "HYV4MTPModel", ("hy_v4",)),
    Family("inkling_mtp", "InklingMTPModel", ("inkling_mm_model", "inkling_model"),
           count=f"mtp_config.{NEXTN}", extra=_inkling),
    Family("gemma4_mtp", "Gemma4MTPModel", ("gemma4_assistant", "gemma4_unified_assistant"),
           count="=1", extra=_gemma4),
    Family("minimax_m3_mtp", "MiniMaxM3MTP", ("minimax_m3_vl", "minimax_m3_mtp"),
           ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration",
            "MiniMaxM3MTP"),
           count="num_mtp_modules", default=1, promote=True),
    Family("glm5_next_mtp", "Glm5NextMTPModel", ("glm5_next",), count=f"text.{NEXTN}",
           extra=_copy_index_share),
)  # fmt: skip

_NEMOTRON = Family(
    "nemotron_h_mtp", "NemotronHMTPModel", ("nemotron_h", "nemotron_h_puzzle"), default=1
)
_NEMOTRON_WRAPPED = ("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3")


def _count(family: Family, hf: Mapping[str, Any]) -> int | None:
    """Module count of a config: a constant, or a key at the top, in the text part or a section."""
    key = family.count
    if key.startswith("="):
        return int(key[1:])
    section, _, name = key.rpartition(".")
    if section == "text":
        places: tuple[Any, ...] = (_text(hf), hf)
    elif section:
        places = (hf.get(section) or {},)
    else:
        places = (hf, _text(hf))
    for place in places:
        if place.get(name) is not None:
            return int(place[name])
    if section == "text" and name != NEXTN and _text(hf).get(NEXTN) is not None:
        return int(_text(hf)[NEXTN])
    return family.default


def _apply(family: Family, hf: Hf, architecture: str) -> None:
    hf["__from_type__"], hf["__from_arch__"] = hf.get("model_type"), architecture
    if family.promote:
        origin = {key: hf[key] for key in ("__from_type__", "__from_arch__")}
        _promote(hf)
        hf.update(origin)
    count = _count(family, hf)
    hf["model_type"], hf["architectures"] = family.model_type, [family.architecture]
    if count is not None:
        hf["n_predict"] = count
    if family.zero_layers:
        hf["num_hidden_layers"] = 0
    if family.extra is not None:
        family.extra(hf, count)
    hf.pop("__from_type__", None)
    hf.pop("__from_arch__", None)


def _parse_aux(hf: Hf, architecture: str) -> bool:
    decoder = hf.get("decoder")
    marked = isinstance(decoder, Mapping) and decoder.get("causal_vision_prefix")
    if architecture != "RadioMBartPrefixForCausalLM" or not marked:
        return False
    hf.update(model_type="mtp", architectures=["ParseAuxMTPModel"], n_predict=1)
    return True


def rewrite(hf: Hf) -> None:
    """Rewrite ``hf`` in place if it belongs to a family. Tolerates probe configs without names."""
    architecture = str((hf.get("architectures") or [""])[0])
    kind = hf.get("model_type")
    if _parse_aux(hf, architecture):
        return
    if architecture in _NEMOTRON_WRAPPED:
        _promote(hf)
        kind = hf.get("model_type")
    if kind in _NEMOTRON.types:
        if (hf.get(NEXTN) or 0) > 0:
            _apply(_NEMOTRON, hf, architecture)
        return
    if architecture == "MistralLarge3ForCausalLM":
        hf["architectures"] = ["EagleMistralLarge3ForCausalLM"]
        return
    if kind == "muse_glimmer_assistant":
        hf.setdefault("dflash_config", {}).setdefault("causal", False)
        hf.setdefault("vocab_size", 202048)
        return
    for family in FAMILIES:
        # Exact names only: a substring test would claim unrelated checkpoints.
        if kind in family.types or architecture in family.architectures:
            _apply(family, hf, architecture)
            return
