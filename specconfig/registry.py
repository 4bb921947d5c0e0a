"""Method names -> configuration classes: built-in, registered at run time, or by entry point."""

from __future__ import annotations

import importlib
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from specconfig.errors import ConfigError

if TYPE_CHECKING:
    from specconfig.speculators.base import SpeculatorConfig

ENTRY_POINT_GROUP = "paceline.speculative_methods"

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

_custom: dict[str, type[SpeculatorConfig]] = {}


@lru_cache(maxsize=64)
def load_class(qualified: str) -> type[SpeculatorConfig]:
    """Import ``module:Class``."""
    from specconfig.speculators.base import SpeculatorConfig

    module, _, name = qualified.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not (isinstance(found, type) and issubclass(found, SpeculatorConfig)):
        raise ConfigError(
            "config_class", qualified, "a SpeculatorConfig subclass as 'module:Class'", ""
        )
    return found


def qualified_name(cls: type[SpeculatorConfig]) -> str:
    """Inverse of ``load_class``."""
    return f"{cls.__module__}:{cls.__qualname__}"


def register_speculative_method(name: str, config_cls: type[SpeculatorConfig]) -> None:
    """Make ``method: name`` valid. Registering the same class again changes nothing.

    Processes that only receive a resolved config need no registration: the config carries the
    class's qualified name.

    Raises:
        ConfigError: ``name`` is built in, or taken by a different class.
    """
    if name in BUILTIN_METHODS:
        raise ConfigError(
            "method",
            name,
            "a name that is not built in",
            "choose another name",
            message=f"{name!r} is a built-in speculative method",
        )
    if _custom.get(name, config_cls) is not config_cls:
        raise ConfigError(
            "method",
            name,
            "a free name",
            "choose another name",
            message=f"speculative method {name!r} is already registered",
        )
    _custom[name] = config_cls


@lru_cache(maxsize=1)
def _load_entry_points() -> None:
    for point in entry_points(group=ENTRY_POINT_GROUP):
        register_speculative_method(point.name, point.load())


def registered_speculative_methods() -> list[str]:
    """Sorted names of custom methods, entry points included."""
    _load_entry_points()
    return sorted(_custom)


def custom_class_for(method: str | None) -> type[SpeculatorConfig] | None:
    """Class registered under ``method``, or None for built-in and unknown names."""
    if method is None or method in BUILTIN_METHODS:
        return None
    if method not in _custom:
        _load_entry_points()
    return _custom.get(method)


def config_class(method: str) -> type[SpeculatorConfig]:
    """Class of a canonical method name (aliases must be normalised first)."""
    custom = custom_class_for(method)
    return custom if custom is not None else load_class(CONFIG_BY_METHOD[method])


def check_method(method: str) -> None:
    """Raise unless ``method`` is built in or registered; the error lists both sets."""
    if method in BUILTIN_METHODS or custom_class_for(method) is not None:
        return
    from specconfig.errors import nearest

    builtin, custom = sorted(BUILTIN_METHODS), registered_speculative_methods()
    close = nearest(method, [*builtin, *custom])
    raise ConfigError(
        "speculative_config.method",
        method,
        f"built-in methods {builtin}; registered custom methods {custom}",
        f"did you mean {close!r}?" if close else "use one of these, or register the method",
        message=f"Unknown speculative method {method!r}",
    )
