"""Which method is this: by name, by spelling, or by what the draft checkpoint declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specconfig.errors import ConfigError, MethodMismatchError
from specconfig.facts.source import is_dotted_path
from specconfig.method_names import (
    CONFIG_BY_METHOD,
    DETECTION_ORDER,
    MTP_ALIASES,
    PARALLEL_METHODS,
)
from specconfig.registry import (
    check_method,
    config_class,
    custom_class_for,
    load_class,
    qualified_name,
    registered_speculative_methods,
)
from specconfig.speculators.base import SpeculatorConfig
from specconfig.speculators.draft_config import load_draft
from specconfig.speculators.resolution import Resolution

NGRAM_SPELLINGS = ("ngram", "[ngram]")
_LOOKUP_MODELS = {"ngram_gpu": "ngram_gpu", "suffix": "suffix"}
_FIELD = "speculative_config.method"


def infer_method(res: Resolution) -> type[SpeculatorConfig]:
    """Settle ``method`` (and the default ``model``) and return the class that configures it."""
    _from_spelling(res)
    method = res.method
    if method is None:
        method = _detect_missing(res)
    cls = custom_class_for(res.custom_method) or config_class(method)
    _apply_default_model(res, cls)
    if cls.loads_draft_checkpoint:
        _refuse_mismatch(res, cls, method)
    return cls


def _from_spelling(res: Resolution) -> None:
    """Everything that can be decided from the two strings alone."""
    values, log = res.values, res.log
    method, model = res.method, values["model"]
    if method == "[ngram]":
        method = "ngram"
    if method is not None:
        check_method(method)
        log.note_given(_FIELD, method, "speculative_config.method")
    custom = custom_class_for(method)
    if custom is not None:
        assert method is not None
        res.custom_method = method
        method = custom.base_method or method
        log.note(_FIELD, method, "inferred", f"base method of the registered {res.custom_method!r}")
    elif method in MTP_ALIASES:
        log.deprecated(f"method {method!r} is deprecated; use 'mtp'")
        log.note(_FIELD, "mtp", "inferred", f"{method!r} is an alias")
        method = "mtp"
    elif method in PARALLEL_METHODS:
        _require_parallel(res, method)
        log.note(_FIELD, PARALLEL_METHODS[method], "inferred", f"{method!r}: one-pass drafting")
        method = PARALLEL_METHODS[method]
    elif method is None and is_dotted_path(model):
        method = "custom_class"
        log.note(_FIELD, method, "inferred", f"model {model!r} is a dotted class path")
    elif method is None and model in NGRAM_SPELLINGS:
        method = "ngram"
        log.note(_FIELD, method, "inferred", f"model is spelled {model!r}")
    elif method is None and model in _LOOKUP_MODELS:
        method = _LOOKUP_MODELS[model]
        log.note(_FIELD, method, "inferred", f"model is spelled {model!r}")
    elif method is None and model is None:
        method = "draft_model"
    values["method"] = method


def _require_parallel(res: Resolution, method: str) -> None:
    given = res.options.parallel_drafting
    if "parallel_drafting" in res.given and not given:
        raise ConfigError(
            "speculative_config.parallel_drafting",
            given,
            f"true (or unset) with method {method!r}",
            f"remove it, or use method {PARALLEL_METHODS[method]!r}",
        )
    res.values["parallel_drafting"] = True


def detect(path: str, hf: Mapping[str, Any]) -> str | None:
    """Method a draft checkpoint declares, by its config or its path; None when it is plain."""
    declared = hf.get("speculators_method")
    if isinstance(declared, str):
        return declared
    lowered = path.lower()
    for name in DETECTION_ORDER:
        if config_class(name).matches(lowered, hf):
            return name
    return None


def _detect_missing(res: Resolution) -> str:
    hf = load_draft(res)
    model = res.values["model"]
    found = detect(model, hf)
    method = found or "draft_model"
    reason = (
        f"checkpoint {model!r} is of this method"
        if found
        else f"checkpoint {model!r} declares no method: an ordinary language model"
    )
    res.log.note(_FIELD, method, "checkpoint" if found else "inferred", reason)
    res.values["method"] = method
    return method


def _apply_default_model(res: Resolution, cls: type[SpeculatorConfig]) -> None:
    if res.values["model"] is not None:
        return
    try:
        model = cls.default_model(res)
    except ConfigError as error:
        if res.values["num_speculative_tokens"] is None and error.field.endswith(".model"):
            raise cls.missing_tokens(res) from None
        raise
    res.values["model"] = model
    if model is not None:
        res.log.note("speculative_config.model", model, "target", f"default of {res.method!r}")


def _refuse_mismatch(res: Resolution, cls: type[SpeculatorConfig], method: str) -> None:
    """An explicit method and a checkpoint that says otherwise: an error that names both."""
    hf = load_draft(res)
    path = str(res.values["model"])
    declared = detect(path, hf)
    if declared is None or declared == method or cls.matches(path.lower(), hf):
        if "model" in res.given:
            text = f"declares {declared!r}" if declared else "declares no other method"
            res.log.note("speculative_config.model", path, "given", f"checkpoint {text}")
        return
    if declared == "eagle" and method == "eagle3" and "speculators_method" not in hf:
        # "eagle-" in a path is the family's name; it does not contradict its third version.
        return
    raise MethodMismatchError(
        _FIELD,
        method,
        f"{declared!r}, which draft model {path!r} is",
        f"set method: {declared} or point model at a {method} checkpoint",
        message=(
            f"speculative_config requested method={method!r}, but draft model {path!r} is a "
            f"{declared!r} checkpoint"
        ),
    )


def select_class(res: Resolution, cls: type[SpeculatorConfig]) -> type[SpeculatorConfig]:
    """Class the checkpoint declares, when it refines the method's; else ``cls.specialize``."""
    declared_name = (res.draft_hf or {}).get("speculator_config_class")
    if not declared_name:
        final = cls.specialize(res)
        reason = f"class of method {res.custom_method or res.method!r}"
        if final is not cls:
            reason += f", specialised to {final.variant!r}"
        field = "speculative_config.config_class"
        res.log.note(field, qualified_name(final), "inferred", reason)
        return final
    declared = _known_class(str(declared_name))
    if issubclass(declared, cls):
        res.log.note(
            "speculative_config.config_class",
            declared_name,
            "checkpoint",
            "the draft checkpoint declares its configuration class",
        )
        return declared
    raise MethodMismatchError(
        _FIELD,
        res.method,
        f"{declared.base_method!r}, which the checkpoint declares",
        f"set method: {declared.base_method}",
        message=(
            f"speculative_config requested method={res.method!r}, but draft model "
            f"{res.values['model']!r} declares {declared.base_method!r} ({declared_name})"
        ),
    )


def _known_class(name: str) -> type[SpeculatorConfig]:
    """A declared class, found among known ones: a checkpoint must not name code to import."""
    for qualified in CONFIG_BY_METHOD.values():
        load_class(qualified)
    roots = [custom_class_for(method) for method in registered_speculative_methods()]
    pending: list[type[SpeculatorConfig]] = [SpeculatorConfig, *(c for c in roots if c is not None)]
    known: dict[str, type[SpeculatorConfig]] = {}
    while pending:
        current = pending.pop()
        for key in (qualified_name(current), current.__qualname__):
            known.setdefault(key, current)
        pending.extend(current.__subclasses__())
    if name not in known:
        raise ConfigError(
            "speculator_config_class",
            name,
            "a built-in or registered SpeculatorConfig class",
            "install and register the plugin that provides it",
        )
    return known[name]
