"""The queries of the chart's alerts and dashboards, and the names in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

CHART = Path(__file__).parents[3] / "helm" / "paceline"

# Names of Prometheus' language and of the labels used; the rest of a query are metrics.
_WORDS = frozenset({
    "absent", "by", "count", "group_left", "histogram_quantile", "le", "min", "on", "rate", "sum",
})  # fmt: skip


def queries() -> list[tuple[str, str]]:
    """(where, query) of every alert and every panel."""
    found = [(rule["alert"], rule["expr"]) for rule in yaml.safe_load(
        (CHART / "alerts.yaml").read_text())]  # fmt: skip
    for path in sorted((CHART / "dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            found += [(panel["title"], target["expr"]) for target in panel.get("targets", [])]
    return found


def without_strings(query: str) -> str:
    return re.sub(r'"[^"]*"', '""', query)


def metrics_of(query: str) -> set[str]:
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", without_strings(query))
    bare = re.sub(r"\b(by|on)\s*\([^)]*\)", "", bare)
    return set(re.findall(r"[a-zA-Z_]\w*", bare)) - _WORDS


def labels_of(query: str) -> set[str]:
    inside = re.findall(r"\{([^}]*)\}", without_strings(query))
    matched = {name for text in inside for name in re.findall(r"(\w+)\s*=", text)}
    grouped = re.findall(r"\bby\s*\(([^)]*)\)", query)
    return matched | {name.strip() for text in grouped for name in text.split(",")}
