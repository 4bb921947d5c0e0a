"""JSON Schema of the settings, for editors and for the chart's values."""

from __future__ import annotations

from typing import Any

from specconfig.app_args import AppArgs
from specconfig.method_names import BUILTIN_METHODS
from specconfig.options import SpeculativeOptions

_KV_SIZE = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGT]i?B?|B)?\s*$"}


def speculative_schema() -> dict[str, Any]:
    """Schema of ``speculative_config``; `method` lists the built-in names as examples."""
    schema = SpeculativeOptions.model_json_schema()
    properties = schema["properties"]
    # Registered names are valid too, so the built-in ones are a suggestion, not an enum.
    properties["method"]["examples"] = sorted(BUILTIN_METHODS)
    properties.pop("tensor_parallel_size")
    return schema


def app_schema() -> dict[str, Any]:
    """Schema of the args of one application (a superset of the engine's)."""
    schema = AppArgs.model_json_schema()
    properties = schema["properties"]
    inner = speculative_schema()
    schema.setdefault("$defs", {}).update(inner.pop("$defs", {}))
    schema["$defs"]["SpeculativeOptions"] = inner
    properties["speculative_config"] = {
        "anyOf": [{"$ref": "#/$defs/SpeculativeOptions"}, {"type": "null"}],
        "default": None,
        "description": properties["speculative_config"]["description"],
    }
    properties["kv_cache_memory_bytes"]["anyOf"].append(_KV_SIZE)
    properties["trust_remote_code"] = {"const": False, "default": False}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema
