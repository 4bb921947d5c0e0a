"""Makes `rayservice.schema.json.gz` of KubeRay's CRD, for a new KubeRay version:

    python tests/chart/convert_crd.py ray.io_rayservices.yaml v1.7.0

The file is ray-operator/config/crd/bases/ray.io_rayservices.yaml of github.com/ray-project/kuberay
(Apache-2.0) at that tag. An OpenAPI structural schema becomes a JSON schema that also refuses
unknown keys, which the API server would drop silently.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("rayservice.schema.json.gz")


def convert(schema: Any, *, closed: bool = True) -> Any:
    """`closed`: refuse unknown keys; not inside anyOf and the like, which see a part only."""
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            out[key] = {name: convert(inner, closed=closed) for name, inner in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            out[key] = convert(value, closed=closed)
        elif key in ("anyOf", "allOf", "oneOf"):
            out[key] = [convert(inner, closed=False) for inner in value]
        elif key == "not":
            out[key] = convert(value, closed=False)
        elif not key.startswith("x-kubernetes") and key not in ("nullable", "format"):
            out[key] = value
    if schema.get("x-kubernetes-int-or-string"):
        out.pop("type", None)
        out.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    if schema.get("nullable") and "type" in out:
        out["type"] = [out["type"], "null"]
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if closed and "properties" in schema and not is_open:
        out["additionalProperties"] = False
    return out


def main(crd: str, tag: str) -> None:
    loaded = yaml.load(Path(crd).read_text(), Loader=yaml.CSafeLoader)
    version = next(v for v in loaded["spec"]["versions"] if v["name"] == "v1")
    schema = convert(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    schema["$comment"] = f"ray.io_rayservices.yaml of KubeRay {tag}, Apache-2.0"
    text = json.dumps(schema, separators=(",", ":")).encode()
    FILE.write_bytes(gzip.compress(text, mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
