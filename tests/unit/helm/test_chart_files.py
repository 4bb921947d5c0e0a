"""What can be said of the chart without Helm: `make chart` does the rest."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.serve
import yaml

from actors.stats import EngineStats
from deploy.app import DRAIN_S
from deploy.metrics import METRICS
from specconfig.app_args import AppArgs
from tests.unit.helm.promql import CHART, labels_of, metrics_of, queries

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


# --- values -------------------------------------------------------------------------------------


def test_the_schema_of_the_values_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("values_schema", ROOT / "helm/values_schema.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (CHART / "values.schema.json").read_text() == module.as_text(), (
        "run: python helm/values_schema.py"
    )


def test_every_object_of_the_schema_is_closed() -> None:
    def objects(node: Any, path: str) -> Iterator[str]:
        if isinstance(node, dict):
            if "properties" in node and node.get("additionalProperties") is not False:
                yield path
            for key, value in node.items():
                yield from objects(value, f"{path}/{key}")

    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert list(objects(SCHEMA, "")) == []


def test_every_value_has_a_default_and_a_place_in_values_yaml() -> None:
    def keys(schema: dict[str, Any], values: dict[str, Any], path: str) -> Iterator[str]:
        for name, inner in schema.get("properties", {}).items():
            if name not in values:
                yield f"{path}{name}"
                continue
            reference = inner.get("$ref", "").rpartition("/")[2]
            if reference:
                yield from keys(SCHEMA["$defs"][reference], values[name], f"{path}{name}.")

    missing = set(keys(SCHEMA, VALUES, ""))
    assert missing == {"global"}  # Helm's own


@pytest.mark.parametrize("path", [CHART / "values.yaml", *EXAMPLES], ids=lambda path: path.stem)
def test_examples_fit_the_schema_and_the_application(path: Path) -> None:
    values = yaml.safe_load(path.read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(values)
    AppArgs(**values["engine"])


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split()
                if "==" in line)  # fmt: skip
    assert chart["appVersion"] == project["version"]
    assert VALUES["rayVersion"] == pins["ray"]
    assert VALUES["drainSeconds"] == DRAIN_S


def test_the_image_gets_every_package_and_what_kuberay_calls() -> None:
    # It is not built here: at least nothing may be left out.
    steps = (ROOT / "Dockerfile").read_text()
    sent = (ROOT / ".dockerignore").read_text().split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    for package in (pattern.rstrip("*") for pattern in packages):
        assert f"COPY {package} {package}" in steps
        assert f"!{package}" in sent
    for copied in re.findall(r"^COPY (.+) \S+$", steps, re.MULTILINE):
        assert all((ROOT / name).exists() and f"!{name}" in sent for name in copied.split())
    assert "wget" in steps and "g++" in steps
    assert "USER 1000:1000" in steps and VALUES["podSecurityContext"]["runAsUser"] == 1000


# --- metrics ------------------------------------------------------------------------------------

_LABELS = frozenset({"namespace", "app", "replica", "deployment"})


def our_series() -> dict[str, set[str]]:
    """Labels by the names that a scrape shows."""
    series: dict[str, set[str]] = {}
    for spec in METRICS:
        labels = _LABELS | ({spec.label} if spec.label else set())
        if spec.kind == "histogram":
            series[f"{spec.name}_bucket"] = labels | {"le"}
            series |= {f"{spec.name}_sum": labels, f"{spec.name}_count": labels}
        else:
            series[spec.name] = labels
    return series


def rays_series() -> set[str]:
    """Names in the source of the installed Ray Serve."""
    source = Path(ray.serve.__file__).parent / "_private"
    text = "\n".join(path.read_text() for path in source.glob("*.py"))
    return {f"ray_{name}" for name in re.findall(r'"(serve_\w+)"', text)}


def test_the_parser_of_queries_finds_names() -> None:
    query = 'sum by (a) (rate(x_total{b="c d", e=~"f"}[5m])) / on () group_left y_count > 0.2'
    assert metrics_of(query) == {"x_total", "y_count"}
    assert labels_of(query) == {"a", "b", "e"}


def test_every_metric_of_alerts_and_dashboards_exists() -> None:
    ours, rays = our_series(), rays_series()
    assert len(queries()) > 40
    for where, query in queries():
        names = metrics_of(query)
        assert names, where
        for name in names:
            assert name in ours or name in rays, f"{where}: no metric {name}"
        known = set().union(*(ours.get(name, _LABELS) for name in names))
        assert labels_of(query) <= known, f"{where}: no label {labels_of(query) - known}"
        assert all(query.count(a) == query.count(b) for a, b in ("()", "[]", "{}")), where


def test_alerts_use_values_that_labels_have() -> None:
    reasons = set(EngineStats().snapshot()["num_requests"])
    used = {reason for _, q in queries() for reason in re.findall(r'finish_reason="(\w+)"', q)}
    assert used and used <= reasons
