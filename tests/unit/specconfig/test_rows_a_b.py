"""Acceptance rows A (inference, basic validation) and B (lookup drafters, extraction)."""

from __future__ import annotations

import re
from typing import Any

import pytest

from specconfig.errors import ConfigError
from specconfig.method_names import BUILTIN_METHODS, MTP_ALIASES
from specconfig.resolving.method import is_dotted_path
from tests.unit.specconfig.catalog import engine, spec, target, warnings_of

EHS = {
    "method": "extract_hidden_states",
    "K": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}},
}

RESOLVES = [
    ("A1", {"method": "ngram", "K": 4}, {
        "method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 5,
        "draft_tensor_parallel_size": None}),
    ("A2-bracketed-model", {"model": "[ngram]", "K": 3}, {"method": "ngram"}),
    ("A2-model", {"model": "ngram", "K": 3}, {"method": "ngram"}),
    ("A3-ours-accepts", {"method": "[ngram]", "K": 3}, {"method": "ngram"}),
    ("A6-string", {"method": "ngram", "K": "3"}, {"num_speculative_tokens": 3}),
    ("A13", {"model": "pkg.mod.MyDrafter", "K": 3}, {
        "method": "custom_class", "prompt_lookup_max": 0, "prompt_lookup_min": 0}),
    ("A18", {"method": "ngram", "model": "meta/nowhere", "K": 3}, {
        "method": "ngram", "model": "meta/nowhere"}),
    ("A19", {"method": "ngram_gpu", "K": 3}, {
        "method": "ngram_gpu", "prompt_lookup_max": 5, "prompt_lookup_min": 5}),
    ("A-gap9-model-ngram_gpu", {"model": "ngram_gpu", "K": 3}, {"method": "ngram_gpu"}),
    ("A-gap9-model-suffix", {"model": "suffix"}, {"method": "suffix"}),
    ("B1", {"method": "ngram", "K": 3, "prompt_lookup_max": 4}, {
        "prompt_lookup_max": 4, "prompt_lookup_min": 4}),
    ("B4", {"model": "meta/tiny", "K": 3, "prompt_lookup_max": 4}, {
        "prompt_lookup_max": 0, "prompt_lookup_min": 0}),
    # B5 is about a missing third-party package: suffix decoding is ours, so nothing can be missing.
    ("B5-ours-needs-no-package", {"method": "suffix", "K": 8}, {"num_speculative_tokens": 8}),
    ("B6", {"method": "suffix"}, {
        "num_speculative_tokens": 24, "draft_model_config": None, "draft_parallel_config": None,
        "model": None}),
    ("B8-no-global-tree", {"method": "suffix", "suffix_decoding_max_cached_requests": 0}, {
        "suffix_decoding_max_cached_requests": 0}),
    ("B8-K-over-depth", {"method": "suffix", "K": 40, "suffix_decoding_max_tree_depth": 24}, {
        "num_speculative_tokens": 40}),
    ("B12", {"method": "ngram", "K": 3, "max_model_len": 5}, {"method": "ngram"}),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), [pytest.param(g, e, id=i) for i, g, e in RESOLVES])
def test_resolves(given: dict[str, Any], expected: dict[str, Any]) -> None:
    resolved = spec(given)
    assert {name: getattr(resolved, name) for name in expected} == expected


REFUSED = [
    ("A4", {"method": "ngram"}, "num_speculative_tokens must be provided"),
    ("A5-null-is-missing", {"method": "ngram", "K": None}, "must be provided"),
    ("A6-zero", {"method": "ngram", "K": 0}, "greater than 0"),
    ("A6-negative", {"method": "ngram", "K": -1}, "greater than 0"),
    ("A6-fraction", {"method": "ngram", "K": 2.5}, "integer"),
    # medusa is a method of ours, so another unknown name stands in for it.
    ("A7-unknown-name-lookahead", {"method": "lookahead", "K": 3}, "Unknown speculative method"),
    ("A7-case", {"method": "NGRAM", "K": 3}, "Unknown speculative method 'NGRAM'"),
    ("A8", {"method": "ngram", "K": 3, "foo": 1}, "foo"),
    ("A9", {}, "num_speculative_tokens must be provided"),
    ("A10", {"K": 3}, "without a speculative model"),
    ("A11", {"method": "ngram", "K": 3, "tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
    ("A11-without-K", {"method": "ngram", "tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
    ("A12-hint-first", {"method": "eagle", "K": 3, "tensor_parallel_size": 2},
     "draft_tensor_parallel_size"),
    ("A14", {"method": "custom_class", "K": 3}, "class path in model"),
    ("A16-K", {"method": "eagle", "K": 3}, "without a speculative model"),
    ("A16", {"method": "eagle"}, "num_speculative_tokens must be provided"),
    ("B2", {"method": "ngram", "K": 3, "prompt_lookup_min": 6, "prompt_lookup_max": 3},
     "prompt_lookup_min=6 .*prompt_lookup_max=3"),
    ("B3", {"method": "ngram", "K": 3, "prompt_lookup_min": 0}, "greater than or equal to 1"),
    ("B7-depth", {"method": "suffix", "suffix_decoding_max_tree_depth": 0},
     "max_tree_depth.*greater than or equal to 1"),
    ("B7-cached", {"method": "suffix", "suffix_decoding_max_cached_requests": -1},
     "max_cached_requests.*greater than or equal to 0"),
    ("B7-factor", {"method": "suffix", "suffix_decoding_max_spec_factor": -0.1},
     "max_spec_factor.*greater than or equal to 0"),
    ("B7-prob", {"method": "suffix", "suffix_decoding_min_token_prob": 1.01},
     "min_token_prob.*less than or equal to 1"),
    ("B10-K", {**EHS, "K": 3}, "num_speculative_tokens.*1"),
    ("B10-ids", {"method": "extract_hidden_states", "K": 1}, "non-empty list of layer ids"),
    ("B10-probabilistic", {**EHS, "draft_sample_method": "probabilistic"}, "draft_sample_method"),
    ("B11", {**EHS, "rejection_sample_method": "fly"}, "does no speculation"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "gist"), [pytest.param(g, m, id=i) for i, g, m in REFUSED])
def test_refused(given: dict[str, Any], gist: str) -> None:
    with pytest.raises(ConfigError) as raised:
        spec(given)
    assert re.search(gist, str(raised.value), re.DOTALL), str(raised.value)
    assert raised.value.field.startswith("speculative_config")


def test_A1_ngram_shares_the_target_as_vocabulary_source() -> None:
    model = target()
    resolved = spec({"method": "ngram", "K": 4}, target_config=model)
    assert resolved.draft_model_config == model
    assert engine({"method": "ngram", "K": 4}).max_num_new_slots_for_drafting == 0


def test_A7_error_lists_every_method() -> None:
    with pytest.raises(ConfigError) as raised:
        spec({"method": "lookahead", "K": 3})
    assert all(repr(name) in str(raised.value) for name in BUILTIN_METHODS)
    assert "registered custom methods" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("Qwen2.5", False, id="A15-Qwen2.5"),
        pytest.param("llama3.1-8b", False, id="A15-llama3.1-8b"),
        pytest.param("http://a.b", False, id="A15-url"),
        pytest.param("a/b.c", False, id="A15-path"),
        ("a..b", False),
        (".a.b", False),
        ("a.b-c", False),
        (None, False),
        ("pkg.My", True),
        ("gpt2.medium", True),
        ("Meta.Llama", True),
    ],
)
def test_dotted_path(text: str | None, expected: bool) -> None:
    assert is_dotted_path(text) is expected


def test_A13_warns_that_it_is_experimental() -> None:
    assert "experimental" in warnings_of({"model": "pkg.mod.MyDrafter", "K": 3})


@pytest.mark.parametrize("alias", [pytest.param(name, id=f"A17-{name}") for name in MTP_ALIASES])
def test_A17_alias(alias: str) -> None:
    with pytest.warns(DeprecationWarning, match=alias):
        assert spec({"method": alias, "K": 1}, model="ds/V3").method == "mtp"


def test_A17_mtp_itself_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    spec({"method": "mtp", "K": 1}, model="ds/V3")
    assert not [w for w in recwarn if issubclass(w.category, DeprecationWarning)]
    assert len(MTP_ALIASES) == 27


def test_A19_runs_the_ngram_drafter() -> None:
    # One lookup implementation serves both names, so "use_ngram" is the implementation's identity.
    both = [engine({"method": name, "K": 3}) for name in ("ngram", "ngram_gpu")]
    assert both[0].drafter_implementation == both[1].drafter_implementation


def test_B6_warns_about_the_default() -> None:
    assert "maximum tree depth 24" in warnings_of({"method": "suffix"})


def test_B9_extraction_copies_the_target() -> None:
    model = target()
    before = model.model_dump()
    resolved = spec(EHS, target_config=model)
    draft = resolved.draft_model_config
    assert draft is not None and draft.architecture == "ExtractHiddenStatesModel"
    assert resolved.aux_hidden_state_layer_ids == (1, 2, 3, 4)
    assert draft.hf_config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3, 4]
    assert model.model_dump() == before
    config = engine(EHS)
    law = config.draft_law
    assert law is not None and law.keeps_kv and not law.proposes
    assert (law.num_lookahead_tokens, law.num_next_tokens) == (0, 0)
    assert config.aux_hidden_state_layer_ids == (1, 2, 3, 4)


def test_B12_says_that_the_limit_is_ignored() -> None:
    assert "ignored" in warnings_of({"method": "ngram", "K": 3, "max_model_len": 5})
