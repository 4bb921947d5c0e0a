"""Which acceptance rule a config resolves to, and what it promises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specconfig import acceptance
from specconfig.engine import EngineConfig
from specconfig.errors import ConfigError
from tests.unit.specconfig.catalog import engine

NGRAM = {"method": "ngram", "K": 3}
EXACT = "actors.acceptance.exact:ExactMatch"


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    before = dict(acceptance._custom)
    yield
    acceptance._custom.clear()
    acceptance._custom.update(before)


def resolved(**given: Any) -> EngineConfig:
    return engine({**NGRAM, **given})


@pytest.mark.parametrize(
    ("given", "implementation", "options", "lossless"),
    [
        (None, EXACT, {}, True),
        (NGRAM, EXACT, {}, True),
        ({"model": "org/EAGLE3-head", "K": 3, "draft_sample_method": "probabilistic"},
         "actors.acceptance.standard:RatioTest", {}, True),
        ({**NGRAM, "rejection_sample_method": "block"},
         "actors.acceptance.block:BlockVerification", {}, True),
        ({**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2},
         "actors.acceptance.synthetic:SyntheticAcceptance", {"rates": (1.0, 0.0, 0.0)}, False),
        ({**NGRAM, "rejection_sample_method": "fly"}, "actors.acceptance.fly:FlyAcceptance",
         {"window_size": 2, "entropy_threshold": 0.3, "entropy_top_k": 3}, False),
        ({**NGRAM, "rejection_sample_method": "pkg.rules:Mine", "acceptance_options": {"a": 1}},
         "pkg.rules:Mine", {"a": 1}, False),
        ({**NGRAM, "rejection_sample_method": EXACT}, EXACT, {}, True),
    ],
)  # fmt: skip
def test_resolves_to_an_implementation_with_its_options(
    given: dict[str, Any] | None, implementation: str, options: dict[str, Any], lossless: bool
) -> None:
    config = engine(given)
    assert config.acceptance_implementation == implementation
    assert config.acceptance_options == options and config.is_lossless is lossless


@pytest.mark.parametrize("lossless", [True, False])
def test_a_registered_rule_keeps_its_promise_where_it_is_not_registered(lossless: bool) -> None:
    acceptance.register_acceptance_method("mine", "pkg.rules:Mine", lossless=lossless)
    acceptance.register_acceptance_method("mine", "pkg.rules:Mine", lossless=lossless)
    config = resolved(rejection_sample_method="mine", acceptance_options={"a": 1})
    assert resolved(rejection_sample_method="pkg.rules:Mine").is_lossless is lossless
    assert ("does not promise" in "\n".join(config.warnings)) is not lossless
    acceptance._custom.clear()
    again = EngineConfig.from_json(config.to_json())
    assert (again.acceptance_implementation, again.acceptance_options, again.is_lossless) == (
        "pkg.rules:Mine", {"a": 1}, lossless,
    )  # fmt: skip


def test_names_are_taken_once_and_paths_are_checked() -> None:
    acceptance.register_acceptance_method("mine", "pkg.rules:Mine", lossless=False)
    for name, path, gist in (
        ("mine", "pkg.rules:Other", "already registered"),
        ("block", "pkg.rules:Mine", "built in"),
        ("new", "pkg.rules", "package.module:Name"),
    ):
        with pytest.raises(ConfigError, match=gist):
            acceptance.register_acceptance_method(name, path, lossless=True)


def test_unknown_names_and_misplaced_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"registered methods \['mine'\].*did you mean 'block'"):
        acceptance.register_acceptance_method("mine", "pkg.rules:Mine", lossless=False)
        resolved(rejection_sample_method="blok")
    with pytest.raises(ConfigError, match="acceptance_options"):
        resolved(acceptance_options={"a": 1})


class Point:
    """Stand-in for an installed entry point."""

    name = "plugin_rule"

    @staticmethod
    def load() -> acceptance.AcceptanceMethod:
        return acceptance.AcceptanceMethod("plugin.rules:Rule", is_lossless=True)


def test_entry_points_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "entry_points", lambda group: [Point])
    acceptance._load_entry_points.cache_clear()
    try:
        config = resolved(rejection_sample_method="plugin_rule")
        assert config.acceptance_implementation == "plugin.rules:Rule" and config.is_lossless
    finally:
        acceptance._load_entry_points.cache_clear()
