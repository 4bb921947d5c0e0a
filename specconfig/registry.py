"""Method names -> configuration classes: built-in, registered at run time, or by entry point."""

from __future__ import annotations

import importlib
from functools import lru_cache
from importlib.metadata import entry_points

from specconfig.errors import ConfigError, nearest
from specconfig.method_names import BUILTIN_METHODS, CONFIG_BY_METHOD
from specconfig.speculators.base import SpeculatorConfig

ENTRY_POINT_GROUP = "paceline.speculative_methods"

_custom: dict[str, type[SpeculatorConfig]] = {}


@lru_cache(maxsize=64)
def load_class(qualified: str) -> type[SpeculatorConfig]:
    """Import ``module:Class``."""
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
    builtin, custom = sorted(BUILTIN_METHODS), registered_speculative_methods()
    close = nearest(method, [*builtin, *custom])
    raise ConfigError(
        "speculative_config.method",
        method,
        f"built-in methods {builtin}; registered custom methods {custom}",
        f"did you mean {close!r}?" if close else "use one of these, or register the method",
        message=f"Unknown speculative method {method!r}",
    )
