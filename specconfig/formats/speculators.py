"""The speculators format: ``config.json`` of a trained head -> a draft config of ours.

In this format "verifier" means the target model; the word stays with this format.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from specconfig.errors import FormatError
from specconfig.facts.model_facts import CLASS_DEFAULTS

Hf = dict[str, Any]

BASE_OPTIONS: dict[str, dict[str, Any]] = {
    "eagle": {"method": "eagle"},
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "dflash": {"method": "dflash"},
    "dflash2": {"method": "dflash"},
    "dspark": {"method": "dspark"},
    "mtp": {"method": "mtp"},
    "independent": {"method": "draft_model"},
}
"""speculators_model_type -> options it stands for."""

TOKENS_KEY = "speculators_tokens"
"""Where a converted config keeps the K that its speculator declares."""
TYPES_WITHOUT_LAYERS = ("independent",)
_EAGLE3_ARCHITECTURES = {
    "eagle3": {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"},
    "peagle": {"llama": "PeagleLlamaForCausalLM", "qwen3": "PeagleQwen3ForCausalLM"},
}
_DSPARK_ARCHITECTURES = ("Qwen3DSparkModel", "Qwen3OmniDSparkModel")
_DSPARK_COPIED = (
    "draft_vocab_size", "target_hidden_size", "mask_token_id", "markov_rank", "markov_head_type",
    "block_size", "enable_confidence_head", "confidence_head_with_markov", "use_aux_hidden_state",
)  # fmt: skip
_DFLASH2_COPIED = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def is_speculators(hf: Mapping[str, Any]) -> bool:
    """Whether a config dict is of this format."""
    return hf.get("speculators_config") is not None


def broken_structure(hf: Mapping[str, Any], model: str, key: str, value: object) -> FormatError:
    """Error for a part of the format that is missing or malformed."""
    return FormatError(
        f"{model}: {key}",
        value,
        "see the speculators format: proposal_methods[0]."
        "speculative_tokens, verifier.name_or_path, speculators_model_type",
        "export the speculator again with a current version of its trainer",
        message=f"Invalid speculators config structure: {key} is missing or malformed",
    )


def speculators_type(hf: Mapping[str, Any], model: str) -> str:
    """The algorithm, checked early so that the error can list what is known."""
    kind = hf.get("speculators_model_type")
    if not kind:
        raise broken_structure(hf, model, "speculators_model_type", kind)
    if kind not in BASE_OPTIONS:
        raise FormatError(
            "speculators_model_type",
            kind,
            f"expected one of {sorted(BASE_OPTIONS)}",
            "use a speculator of one of these types",
            message=f"unknown speculators_model_type {kind!r} in {model}",
        )
    return str(kind)


def layer_config(hf: Mapping[str, Any], model: str) -> Hf:
    """A private copy of ``transformer_layer_config``."""
    if "transformer_layer_config" not in hf:
        raise FormatError(
            "transformer_layer_config",
            None,
            "an object",
            "export the speculator again",
            message=f"{model}: Must provide transformer_layer_config",
        )
    section = hf["transformer_layer_config"]
    if not isinstance(section, Mapping):
        raise FormatError(
            "transformer_layer_config",
            section,
            f"an object, not a {type(section).__name__}",
            "export the speculator again",
        )
    return copy.deepcopy(dict(section))


def _require(hf: Mapping[str, Any], key: str, kind: str) -> Any:
    if hf.get(key) is None:
        raise FormatError(
            key, None, f"set in every {kind} speculator", "export the speculator again"
        )
    return hf[key]


def _copy(source: Mapping[str, Any], out: Hf, keys: tuple[str, ...]) -> None:
    out.update({key: source[key] for key in keys if source.get(key) is not None})


def _eagle3(hf: Mapping[str, Any], out: Hf, kind: str) -> None:
    inner = out.get("model_type", "llama")
    table = _EAGLE3_ARCHITECTURES[kind]
    if inner not in table:
        raise FormatError(
            "transformer_layer_config.model_type",
            inner,
            f"one of {sorted(table)}",
            "retrain the head with one of these layer types",
        )
    out["architectures"] = [table[inner]]
    out["inner_model_type"] = inner
    out["draft_vocab_size"] = hf.get("draft_vocab_size")
    out["norm_before_residual"] = hf.get("norm_before_residual", kind == "eagle3")
    out["norm_before_fc"] = hf.get("norm_before_fc", False)
    if kind == "eagle3":
        out["fc_norm"] = hf.get("fc_norm", False)
        out["norm_output"] = hf.get("norm_output", False)
    else:
        out["pard_token"] = _require(hf, "mask_token_id", kind)
    _copy(hf, out, ("target_hidden_size",))
    if hf.get("eagle_aux_hidden_state_layer_ids"):
        out["eagle_aux_hidden_state_layer_ids"] = list(hf["eagle_aux_hidden_state_layer_ids"])


def _dflash(hf: Mapping[str, Any], out: Hf, kind: str) -> None:
    aux = list(_require(hf, "aux_hidden_state_layer_ids", kind))
    mask = _require(hf, "mask_token_id", kind)
    out["architectures"] = ["DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"]
    out["draft_vocab_size"] = hf.get("draft_vocab_size")
    out["eagle_aux_hidden_state_layer_ids"] = aux
    out["dflash_config"] = {
        "mask_token_id": mask,
        "target_layer_ids": [index - 1 for index in aux],
        "sample_from_anchor": hf.get("sample_from_anchor", False),
        "causal": not hf.get("sliding_window_non_causal", True),
    }
    _copy(hf, out, ("target_hidden_size", "block_size"))
    if kind == "dflash2":
        _copy(hf, out["dflash_config"], _DFLASH2_COPIED)


def _dspark(hf: Mapping[str, Any], out: Hf, kind: str) -> None:
    aux = list(_require(hf, "aux_hidden_state_layer_ids", kind))
    _require(hf, "mask_token_id", kind)
    listed = [arch for arch in hf.get("architectures") or () if arch in _DSPARK_ARCHITECTURES]
    anchor = bool(hf.get("sample_from_anchor", False))
    out["architectures"] = listed[:1] or ["Qwen3DSparkModel"]
    out["sample_from_anchor"] = anchor
    out["dspark_bonus_anchor"] = not anchor
    out["eagle_aux_hidden_state_layer_ids"] = aux
    out["target_layer_ids"] = [index - 1 for index in aux]
    _copy(hf, out, _DSPARK_COPIED)


def _eagle(hf: Mapping[str, Any], out: Hf, kind: str) -> None:
    del kind
    inner = str(out.get("model_type", "llama"))
    out["inner_model_type"] = inner
    out["architectures"] = [f"Eagle{inner.capitalize()}ForCausalLM"]
    _copy(hf, out, ("layernorms", "fusion_bias"))


def _mtp(hf: Mapping[str, Any], out: Hf, kind: str) -> None:
    del kind
    inner = str(out.get("model_type", "qwen3"))
    out["inner_model_type"] = inner
    out["model_type"] = "mtp"
    out["architectures"] = ["SpeculatorsMTPModel"]
    out["num_nextn_predict_layers"] = int(hf.get("num_nextn_predict_layers") or 1)
    out["n_predict"] = out["num_nextn_predict_layers"]


def _copy_tokens(hf: Mapping[str, Any], out: Hf) -> None:
    """K of the first proposal method, where there is one."""
    section = hf.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, Mapping) else None
    first = methods[0] if isinstance(methods, (list, tuple)) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0:
        out[TOKENS_KEY] = tokens


_MARKOV_HEADS = ("vanilla", "gated", "rnn")


def validate(hf: Mapping[str, Any], kind: str) -> None:
    """Rules of the format that config.json alone can show to be broken."""

    def fail(key: str, allowed: str) -> FormatError:
        return FormatError(key, hf.get(key), allowed, "export the speculator again")

    if hf.get("fc_norm") and hf.get("norm_before_fc"):
        raise fail("fc_norm", "not together with norm_before_fc")
    if kind == "dspark":
        if hf.get("markov_head_type") not in (None, *_MARKOV_HEADS):
            raise fail("markov_head_type", f"one of {list(_MARKOV_HEADS)}")
        if hf.get("confidence_head_with_markov") and hf.get("markov_rank") == 0:
            raise fail("confidence_head_with_markov", "false when markov_rank is 0")
    inner = hf.get("transformer_layer_config") or {}
    reduced = hf.get("draft_vocab_size")
    if kind == "dflash2" and reduced is not None and reduced != inner.get("vocab_size"):
        raise fail("draft_vocab_size", f"the full vocabulary {inner.get('vocab_size')} for dflash2")
    if kind == "mtp" and hf.get("num_nextn_predict_layers") not in (None, 1):
        raise fail("num_nextn_predict_layers", "1")
    section = hf.get("speculators_config") or {}
    default, methods = section.get("default_proposal_method"), section.get("proposal_methods")
    kinds = [entry.get("proposal_type") for entry in methods or () if isinstance(entry, Mapping)]
    if default is not None and any(kinds) and default not in kinds:
        raise FormatError(
            "speculators_config.default_proposal_method",
            default,
            f"the proposal_type of one method: {kinds}",
            "export the speculator again",
        )


_CONVERSIONS = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "peagle": _eagle3,
    "dflash": _dflash,
    "dflash2": _dflash,
    "dspark": _dspark,
    "mtp": _mtp,
}


def convert_if_speculators(hf: Hf, model: str) -> Hf:
    """Draft config of a speculators checkpoint; any other config is returned as it is.

    The caller's dict is not changed. The result carries ``speculators_method`` and
    ``speculators_tokens`` (what the checkpoint declares) and model_type 'speculators', so it is
    never wrapped a second time.
    """
    if not is_speculators(hf):
        return hf
    kind = speculators_type(hf, model)
    if kind in TYPES_WITHOUT_LAYERS:
        out = copy.deepcopy(hf)
        out["speculators_method"] = BASE_OPTIONS[kind]["method"]
        _copy_tokens(hf, out)
        return out
    out = layer_config(hf, model)
    validate(hf, kind)
    # The layers' own type is replaced below, so what it implies is written down first.
    for key, value in CLASS_DEFAULTS.get(str(out.get("model_type", "llama")), {}).items():
        if out.get(key) is None:
            out[key] = value
    _CONVERSIONS[kind](hf, out, kind)
    if kind != "mtp":
        out["model_type"] = "speculators"
    out["speculators_model_type"] = kind
    out["speculators_method"] = BASE_OPTIONS[kind]["method"]
    _copy_tokens(hf, out)
    for key in ("dtype", "torch_dtype"):
        if hf.get(key) is not None:
            out.setdefault(key, hf[key])
    return out
