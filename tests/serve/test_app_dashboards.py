"""The chart's dashboard and alerts ask for what a running server shows."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.conftest import App
from tests.unit.helm.promql import labels_of, metrics_of, queries

pytestmark = pytest.mark.ray

# What Prometheus and the scrape's configuration add.
_ADDED = {"namespace", "app"}


def test_a_scrape_answers_every_query(app: App) -> None:
    body = {"prompt": "abcabcabc", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    httpx.post(f"{app.url}/v1/completions", json=body, timeout=60).raise_for_status()
    page = httpx.get(f"{app.url}/metrics", timeout=10).text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    asked = [(where, query) for where, query in queries() if "paceline_" in query]
    assert len(asked) > 40
    for where, query in asked:
        names = metrics_of(query)
        assert names <= set(labels), where
        assert labels_of(query) - _ADDED <= set().union(*(labels[name] for name in names)), where
