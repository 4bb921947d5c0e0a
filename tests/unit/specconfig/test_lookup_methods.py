"""Methods by name and spelling, lookup drafters, and extraction."""

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
    ({"method": "ngram", "K": 4}, {
        "method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 5,
        "draft_tensor_parallel_size": None}),
    ({"model": "[ngram]", "K": 3}, {"method": "ngram"}),
    ({"model": "ngram", "K": 3}, {"method": "ngram"}),
    ({"method": "[ngram]", "K": 3}, {"method": "ngram"}),
    ({"method": "ngram", "K": "3"}, {"num_speculative_tokens": 3}),
    ({"model": "pkg.mod.MyDrafter", "K": 3}, {
        "method": "custom_class", "prompt_lookup_max": 0, "prompt_lookup_min": 0}),
    ({"method": "ngram", "model": "meta/nowhere", "K": 3}, {
        "method": "ngram", "model": "meta/nowhere"}),
    ({"method": "ngram_gpu", "K": 3}, {
        "method": "ngram_gpu", "prompt_lookup_max": 5, "prompt_lookup_min": 5}),
    ({"model": "ngram_gpu", "K": 3}, {"method": "ngram_gpu"}),
    ({"model": "suffix"}, {"method": "suffix"}),
    ({"method": "ngram", "K": 3, "prompt_lookup_max": 4}, {
        "prompt_lookup_max": 4, "prompt_lookup_min": 4}),
    ({"model": "meta/tiny", "K": 3, "prompt_lookup_max": 4}, {
        "prompt_lookup_max": 0, "prompt_lookup_min": 0}),
    # B5 is about a missing third-party package: suffix decoding is ours, so nothing can be missing.
    ({"method": "suffix", "K": 8}, {"num_speculative_tokens": 8}),
    ({"method": "suffix"}, {
        "num_speculative_tokens": 24, "draft_model_config": None, "draft_parallel_config": None,
        "model": None}),
    ({"method": "suffix", "suffix_decoding_max_cached_requests": 0}, {
        "suffix_decoding_max_cached_requests": 0}),
    ({"method": "suffix", "K": 40, "suffix_decoding_max_tree_depth": 24}, {
        "num_speculative_tokens": 40}),
    ({"method": "ngram", "K": 3, "max_model_len": 5}, {"method": "ngram"}),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), RESOLVES)
def test_resolves(given: dict[str, Any], expected: dict[str, Any]) -> None:
    resolved = spec(given)
    assert {name: getattr(resolved, name) for name in expected} == expected


REFUSED = [
    ({"method": "ngram"}, "num_speculative_tokens must be provided"),
    ({"method": "ngram", "K": None}, "must be provided"),
    ({"method": "ngram", "K": 0}, "greater than 0"),
    ({"method": "ngram", "K": -1}, "greater than 0"),
    ({"method": "ngram", "K": 2.5}, "integer"),
    # medusa is a method of ours, so another unknown name stands in for it.
    ({"method": "lookahead", "K": 3}, "Unknown speculative method"),
    ({"method": "NGRAM", "K": 3}, "Unknown speculative method 'NGRAM'"),
    ({"method": "ngram", "K": 3, "foo": 1}, "foo"),
    ({}, "num_speculative_tokens must be provided"),
    ({"K": 3}, "without a speculative model"),
    ({"method": "ngram", "K": 3, "tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
    ({"method": "ngram", "tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
    ({"method": "eagle", "K": 3, "tensor_parallel_size": 2},
     "draft_tensor_parallel_size"),
    ({"method": "custom_class", "K": 3}, "class path in model"),
    ({"method": "eagle", "K": 3}, "without a speculative model"),
    ({"method": "eagle"}, "num_speculative_tokens must be provided"),
    ({"method": "ngram", "K": 3, "prompt_lookup_min": 6, "prompt_lookup_max": 3},
     "prompt_lookup_min=6 .*prompt_lookup_max=3"),
    ({"method": "ngram", "K": 3, "prompt_lookup_min": 0}, "greater than or equal to 1"),
    ({"method": "suffix", "suffix_decoding_max_tree_depth": 0},
     "max_tree_depth.*greater than or equal to 1"),
    ({"method": "suffix", "suffix_decoding_max_cached_requests": -1},
     "max_cached_requests.*greater than or equal to 0"),
    ({"method": "suffix", "suffix_decoding_max_spec_factor": -0.1},
     "max_spec_factor.*greater than or equal to 0"),
    ({"method": "suffix", "suffix_decoding_min_token_prob": 1.01},
     "min_token_prob.*less than or equal to 1"),
    ({**EHS, "K": 3}, "num_speculative_tokens.*1"),
    ({"method": "extract_hidden_states", "K": 1}, "non-empty list of layer ids"),
    ({**EHS, "draft_sample_method": "probabilistic"}, "draft_sample_method"),
    ({**EHS, "rejection_sample_method": "fly"}, "does no speculation"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "gist"), REFUSED)
def test_refused(given: dict[str, Any], gist: str) -> None:
    with pytest.raises(ConfigError) as raised:
        spec(given)
    assert re.search(gist, str(raised.value), re.DOTALL), str(raised.value)
    assert raised.value.field.startswith("speculative_config")


def test_ngram_shares_the_target_as_vocabulary_source() -> None:
    model = target()
    resolved = spec({"method": "ngram", "K": 4}, target_config=model)
    assert resolved.draft_model_config == model
    assert engine({"method": "ngram", "K": 4}).max_num_new_slots_for_drafting == 0


def test_unknown_methods_get_a_list_of_every_method() -> None:
    with pytest.raises(ConfigError) as raised:
        spec({"method": "lookahead", "K": 3})
    assert all(repr(name) in str(raised.value) for name in BUILTIN_METHODS)
    assert "registered custom methods" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("Qwen2.5", False, id="Qwen2.5"),
        pytest.param("llama3.1-8b", False, id="llama3.1-8b"),
        pytest.param("http://a.b", False, id="url"),
        pytest.param("a/b.c", False, id="path"),
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


def test_a_class_path_warns_that_it_is_experimental() -> None:
    assert "experimental" in warnings_of({"model": "pkg.mod.MyDrafter", "K": 3})


@pytest.mark.parametrize("alias", [pytest.param(name, id=name) for name in MTP_ALIASES])
def test_model_specific_mtp_names_are_deprecated_aliases(alias: str) -> None:
    with pytest.warns(DeprecationWarning, match=alias):
        assert spec({"method": alias, "K": 1}, model="ds/V3").method == "mtp"


def test_mtp_itself_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    spec({"method": "mtp", "K": 1}, model="ds/V3")
    assert not [w for w in recwarn if issubclass(w.category, DeprecationWarning)]
    assert len(MTP_ALIASES) == 27


def test_ngram_gpu_runs_the_ngram_drafter() -> None:
    # One lookup implementation serves both names, so "use_ngram" is the implementation's identity.
    both = [engine({"method": name, "K": 3}) for name in ("ngram", "ngram_gpu")]
    assert both[0].drafter_implementation == both[1].drafter_implementation


def test_suffix_warns_about_its_default_K() -> None:
    assert "maximum tree depth 24" in warnings_of({"method": "suffix"})


def test_extraction_copies_the_target() -> None:
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


def test_a_draft_limit_of_a_lookup_drafter_is_said_to_be_ignored() -> None:
    assert "ignored" in warnings_of({"method": "ngram", "K": 3, "max_model_len": 5})
