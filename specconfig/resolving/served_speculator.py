"""A speculators checkpoint given as the served ``model``: it brings target, method and K along."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specconfig.decisions import DecisionLog
from specconfig.engine_fields import FLAGS, EngineFields
from specconfig.errors import ConfigError, FormatError
from specconfig.facts.source import expand
from specconfig.formats.speculators import (
    BASE_OPTIONS,
    TYPES_WITHOUT_LAYERS,
    Hf,
    broken_structure,
    is_speculators,
    layer_config,
    speculators_type,
)
from specconfig.options import normalise_keys

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def proposed_tokens(hf: Mapping[str, Any], model: str) -> int:
    """K of the first proposal method; later ones are alternatives nobody selects here."""
    section = hf["speculators_config"]
    if not isinstance(section, Mapping):
        raise broken_structure(hf, model, "speculators_config", section)
    methods = section.get("proposal_methods")
    if not isinstance(methods, (list, tuple)) or not methods or not isinstance(methods[0], Mapping):
        raise broken_structure(hf, model, "speculators_config.proposal_methods", methods)
    if "speculative_tokens" not in methods[0]:
        raise broken_structure(
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
        raise broken_structure(hf, model, "speculators_config.verifier.name_or_path", verifier)
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
    if kind not in TYPES_WITHOUT_LAYERS:
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
