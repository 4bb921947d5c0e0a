"""The speculators format: ``config.json`` of a trained head <-> our options.

Two uses: a head given as the draft (``convert_if_speculators``), and a head given as the served
``model``, which brings its target, method and K along (``serve_speculators_model``). In this format
"verifier" means the target model; the word stays inside this module.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specconfig.decisions import DecisionLog
from specconfig.engine_fields import FLAGS, EngineFields
from specconfig.errors import ConfigError, FormatError
from specconfig.facts.model_facts import CLASS_DEFAULTS
from specconfig.facts.source import expand
from specconfig.options import normalise_keys

Hf = dict[str, Any]

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")

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

_TYPES_WITHOUT_LAYERS = ("independent",)
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


def _structure(hf: Mapping[str, Any], model: str, key: str, value: object) -> FormatError:
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
        raise _structure(hf, model, "speculators_model_type", kind)
    if kind not in BASE_OPTIONS:
        raise FormatError(
            "speculators_model_type",
            kind,
            f"expected one of {sorted(BASE_OPTIONS)}",
            "use a speculator of one of these types",
            message=f"unknown speculators_model_type {kind!r} in {model}",
        )
    return str(kind)


def proposed_tokens(hf: Mapping[str, Any], model: str) -> int:
    """K of the first proposal method; later ones are alternatives nobody selects here."""
    section = hf["speculators_config"]
    if not isinstance(section, Mapping):
        raise _structure(hf, model, "speculators_config", section)
    methods = section.get("proposal_methods")
    if not isinstance(methods, (list, tuple)) or not methods or not isinstance(methods[0], Mapping):
        raise _structure(hf, model, "speculators_config.proposal_methods", methods)
    if "speculative_tokens" not in methods[0]:
        raise _structure(
            hf, model, "speculators_config.proposal_methods[0].speculative_tokens", None
        )
    tokens = methods[0]["speculative_tokens"]
    if tokens is None:
        raise FormatError(
            "proposal_methods[0].speculative_tokens",
            None,
            "a positive integer",
            "set it",
            message=f"Missing 'speculative_tokens' in {model}",
        )
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise FormatError(
            "proposal_methods[0].speculative_tokens", tokens, "a positive integer", "set it to 3"
        )
    return tokens


def target_of(hf: Mapping[str, Any], model: str) -> str:
    """The target named by the speculator: a hub id, or (our extension) an existing local path."""
    section = hf["speculators_config"]
    verifier = section.get("verifier") if isinstance(section, Mapping) else None
    if not isinstance(verifier, Mapping) or "name_or_path" not in verifier:
        raise _structure(hf, model, "speculators_config.verifier.name_or_path", verifier)
    name = verifier["name_or_path"]
    field = "speculators_config.verifier.name_or_path"
    if isinstance(name, str) and Path(expand(name)).is_dir():
        return expand(name)
    if not isinstance(name, str) or not _HUB_ID.fullmatch(name):
        raise FormatError(
            field,
            name,
            "a hub id 'org/name' or an existing local directory",
            "give the target as model and this speculator in speculative_config.model",
            message=f"speculator {model!r} must name a remote model repository or an existing "
            "local directory",
        )
    return name


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

    The caller's dict is not changed. The result carries ``speculators_method`` (what the
    checkpoint declares) and model_type 'speculators', so it is never wrapped a second time.
    """
    if not is_speculators(hf):
        return hf
    kind = speculators_type(hf, model)
    if kind in _TYPES_WITHOUT_LAYERS:
        out = copy.deepcopy(hf)
        out["speculators_method"] = BASE_OPTIONS[kind]["method"]
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
    for key in ("dtype", "torch_dtype"):
        if hf.get(key) is not None:
            out.setdefault(key, hf[key])
    return out


@dataclass(frozen=True)
class ServedSpeculator:
    """What serving a speculator as ``model`` means."""

    target: str
    speculative: dict[str, Any]


def serve_speculators_model(
    args: EngineFields, model: str, hf: Hf, log: DecisionLog
) -> ServedSpeculator | None:
    """Target and options of a speculator given as ``model``; None for any other checkpoint."""
    if not is_speculators(hf) or "://" in model or Path(expand(model)).is_file():
        return None
    kind = speculators_type(hf, model)
    tokens = proposed_tokens(hf, model)
    if kind not in _TYPES_WITHOUT_LAYERS:
        layer_config(hf, model)
    target = target_of(hf, model)
    base = BASE_OPTIONS[kind]
    merged: dict[str, Any] = {"num_speculative_tokens": tokens, **base, **_user_options(args)}
    if base.get("parallel_drafting") and not merged["parallel_drafting"]:
        raise ConfigError(
            "speculative_config.parallel_drafting",
            merged["parallel_drafting"],
            f"true: {model!r} is a {kind} speculator",
            "remove parallel_drafting",
        )
    merged.update(method=base["method"], model=model)
    if args.revision is not None:
        # The revision names a version of what the user wrote, which is the speculator.
        merged.setdefault("revision", args.revision)
    _note(args, kind, target, tokens, merged, log)
    return ServedSpeculator(target, merged)


def _user_options(args: EngineFields) -> dict[str, Any]:
    for flag, key in FLAGS:
        if getattr(args, flag) is not None:
            spelled = "--" + flag.replace("_", "-")
            raise ConfigError(
                flag,
                getattr(args, flag),
                f"not with a speculators model, which sets {key!r} itself",
                f"remove {spelled}" + ("; set K in speculative_config" if "tokens" in flag else ""),
                message=f"{spelled} and a speculators model are mutually exclusive",
            )
    given = normalise_keys(args.speculative_config or {})
    return {key: value for key, value in given.items() if value is not None}


def _note(
    args: EngineFields,
    kind: str,
    target: str,
    tokens: int,
    merged: dict[str, Any],
    log: DecisionLog,
) -> None:
    log.note("model", target, "checkpoint", f"target named by the {kind} speculator")
    log.note("speculative_config.method", merged["method"], "checkpoint", f"{kind} speculator")
    source = "checkpoint" if merged["num_speculative_tokens"] == tokens else "given"
    log.note(
        "speculative_config.num_speculative_tokens",
        merged["num_speculative_tokens"],
        "checkpoint" if source == "checkpoint" else "given",
        "proposal_methods[0].speculative_tokens" if source == "checkpoint" else "overrides it",
    )
    if args.tokenizer is not None and args.tokenizer != target:
        log.warn(f"tokenizer {args.tokenizer!r} is replaced by the target's {target!r}")
    given = normalised_pins(args)
    for key in given:
        log.warn(
            f"speculative_config.{key} is replaced: the speculators model fixes it to "
            f"{merged[key]!r}"
        )


def normalised_pins(args: EngineFields) -> list[str]:
    """User keys that a served speculator overrides."""
    given = normalise_keys(args.speculative_config or {})
    return [key for key in ("method", "model") if given.get(key) is not None]
