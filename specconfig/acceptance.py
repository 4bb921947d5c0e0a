"""Acceptance methods: what each name resolves to, what it promises, and the options it reads.

Built-in names, names registered at run time or by entry point, and any ``package.module:Name``.
Nothing is imported here: the engine imports the implementation, as it does with drafters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import entry_points

from specconfig.errors import ConfigError, nearest

ENTRY_POINT_GROUP = "paceline.acceptance_methods"
"""Each entry point loads an ``AcceptanceMethod``."""

_FIELD = "speculative_config.rejection_sample_method"
_QUALIFIED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class AcceptanceMethod:
    """One way to decide which drafts survive.

    ``options`` maps each keyword of the implementation to the field of ``speculative_config`` that
    holds it. A custom method takes ``acceptance_options`` instead.
    """

    implementation: str
    is_lossless: bool
    options: Mapping[str, str] = field(default_factory=dict)


EXACT_MATCH = AcceptanceMethod("actors.acceptance.exact:ExactMatch", is_lossless=True)
"""Also what an engine without drafts uses: its verdict is the target's own sample."""

RATIO_TEST = AcceptanceMethod("actors.acceptance.standard:RatioTest", is_lossless=True)

BUILTIN: Mapping[str, AcceptanceMethod] = {
    "standard": EXACT_MATCH,
    "block": AcceptanceMethod("actors.acceptance.block:BlockVerification", is_lossless=True),
    "synthetic": AcceptanceMethod(
        "actors.acceptance.synthetic:SyntheticAcceptance",
        is_lossless=False,
        options={"rates": "synthetic_acceptance_rates"},
    ),
    "fly": AcceptanceMethod(
        "actors.acceptance.fly:FlyAcceptance",
        is_lossless=False,
        options={
            "window_size": "fly_window_size",
            "entropy_threshold": "fly_entropy_threshold",
            "entropy_top_k": "fly_entropy_top_k",
        },
    ),
}

_custom: dict[str, AcceptanceMethod] = {}


def register_acceptance_method(name: str, implementation: str, *, lossless: bool) -> None:
    """Make ``rejection_sample_method: name`` valid. The same registration again changes nothing.

    Args:
        implementation: ``package.module:Name`` of the rule.
        lossless: Whether outputs follow exactly the target's distribution. The engine cannot check
            this; it is what the plugin promises, and what users and metrics are told.

    Raises:
        ConfigError: the name is built in or taken, or ``implementation`` is no such path.
    """
    _register(name, AcceptanceMethod(implementation, lossless))


def _register(name: str, method: AcceptanceMethod) -> None:
    if not _QUALIFIED.fullmatch(method.implementation):
        raise ConfigError(
            "implementation", method.implementation, "'package.module:Name'", "write it so"
        )
    if name in BUILTIN or _custom.get(name, method) != method:
        state = "built in" if name in BUILTIN else "already registered"
        raise ConfigError(
            _FIELD,
            name,
            "a free name",
            "choose another name",
            message=f"acceptance method {name!r} is {state}",
        )
    _custom[name] = method


@lru_cache(maxsize=1)
def _load_entry_points() -> None:
    for point in entry_points(group=ENTRY_POINT_GROUP):
        _register(point.name, point.load())


def is_custom(name: str) -> bool:
    """Whether ``name`` is none of the built-in methods."""
    return name not in BUILTIN


def acceptance_method(name: str, has_probabilities: bool) -> AcceptanceMethod:
    """What ``rejection_sample_method: name`` means.

    Args:
        has_probabilities: Drafts come with the distribution they were drawn from; otherwise they
            are one-hot, for which the exact match with the target's own sample is the ratio test.

    Raises:
        ConfigError: a name nobody registered.
    """
    if name in BUILTIN:
        is_ratio_test = BUILTIN[name] is EXACT_MATCH and has_probabilities
        return RATIO_TEST if is_ratio_test else BUILTIN[name]
    if name not in _custom:
        _load_entry_points()
    if name in _custom:
        return _custom[name]
    if _QUALIFIED.fullmatch(name):
        known = (*BUILTIN.values(), RATIO_TEST, *_custom.values())
        # Nobody vouches for a bare path, so it counts as lossy.
        bare = AcceptanceMethod(name, is_lossless=False)
        return next((method for method in known if method.implementation == name), bare)
    close = nearest(name, [*BUILTIN, *_custom])
    raise ConfigError(
        _FIELD,
        name,
        f"built-in methods {sorted(BUILTIN)}; registered methods {sorted(_custom)}; or "
        "'package.module:Name'",
        f"did you mean {close!r}?" if close else "use one of these, or register the method",
        message=f"unknown acceptance method {name!r}",
    )
