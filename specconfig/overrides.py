"""Draft-only overrides of engine settings, applied to copies.

One rule for every method: a field that is not given means "as the target". ('auto' as attention
backend is the same as not given.)
"""

from __future__ import annotations

from collections.abc import Mapping

from specconfig.speculative import SpeculativeConfig

OVERRIDABLE = ("moe_backend", "attention_backend", "kv_cache_dtype")


def draft_overrides(
    spec: SpeculativeConfig, target_settings: Mapping[str, str | None]
) -> dict[str, str | None]:
    """The target's kernel settings as the draft uses them; ``target_settings`` is not changed."""
    settings = dict(target_settings)
    for name in OVERRIDABLE:
        value = getattr(spec, name)
        if value is not None:
            settings[name] = value
    return settings
