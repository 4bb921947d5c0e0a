"""Settings that do nothing, budgets, spellings, format rules, entry points, offline hub ids."""

from __future__ import annotations

from typing import Any

import pytest

from specconfig import registry
from specconfig.engine_args import EngineArgs
from specconfig.errors import ConfigError
from specconfig.facts import source as facts_module
from specconfig.formats.speculators import convert_if_speculators
from specconfig.speculators.ngram import NgramSpeculatorConfig
from tests.unit.specconfig.catalog import (
    BLOCK,
    TARGET,
    engine,
    facts,
    spec,
    speculator,
    warnings_of,
)


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        ({"method": "ngram", "K": 3, "quantization": "awq"}, "quantization"),
        ({"method": "ngram", "K": 3, "use_local_argmax_reduction": True},
         "use_local_argmax_reduction"),
        ({"method": "suffix", "draft_tensor_parallel_size": 1}, "draft_tensor_parallel_size"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"method": "ngram", "K": 3, "model": "meta/tiny"}, "model"),
        ({"model": "meta/tiny", "K": 3, "suffix_decoding_max_tree_depth": 4},
         "suffix_decoding_max_tree_depth"),
        ({"model": "meta/tiny", "K": 3, "prompt_lookup_min": 2}, "prompt_lookup_min"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_said_to_be(given: dict[str, Any], ignored: str) -> None:
    assert f"speculative_config.{ignored} is ignored by" in warnings_of(given)


def test_settings_with_effect_are_not() -> None:
    given = {"model": "meta/tiny", "K": 3, "quantization": "awq", "kv_cache_dtype": "fp8"}
    assert "ignored" not in warnings_of(given)


def test_dspark_candidates_need_one_draft_rank() -> None:
    given = {"model": "org/dspark_x", "dspark_draft_topk": 8}
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size"):
        spec(given, tensor_parallel_size=2)
    spec({**given, "draft_tensor_parallel_size": 1}, tensor_parallel_size=2)


def test_kv_budget() -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        engine(None, kv_cache_memory_bytes="1MiB")
    config = engine(None, kv_cache_memory_bytes="64MiB")
    assert "less than one sequence of max_model_len=8192" in "\n".join(config.warnings)
    assert not engine(None, kv_cache_memory_bytes="64MiB", max_model_len=256).warnings


def test_dotted_keys() -> None:
    # What `serve run deploy.app:build key=value` hands over: strings only.
    args = EngineArgs.from_mapping({
        "model": TARGET, "speculative_config.method": "ngram",
        "speculative_config.num-speculative-tokens": "3", "enable_prefix_caching": "false",
        "max_num_seqs": "4",
    })  # fmt: skip
    config = args.resolve(facts)
    assert (config.num_speculative_tokens, config.scheduler.max_num_seqs) == (3, 4)
    assert config.cache.enable_prefix_caching is False


def test_dotted_keys_do_not_override() -> None:
    with pytest.raises(ConfigError, match="one spelling per key"):
        EngineArgs.from_mapping({
            "model": TARGET, "speculative_config": {"method": "ngram"},
            "speculative_config.method": "suffix",
        })  # fmt: skip
    with pytest.raises(ConfigError, match=r"cache\.block_size"):
        EngineArgs.from_mapping({"model": TARGET, "cache.block_size": 3})


@pytest.mark.parametrize(
    ("hf", "gist"),
    [
        (speculator("eagle3", fc_norm=True, norm_before_fc=True), "fc_norm"),
        (speculator("dspark", **BLOCK, markov_head_type="other"), "markov_head_type"),
        (speculator("dspark", **BLOCK, markov_rank=0, confidence_head_with_markov=True),
         "confidence_head_with_markov"),
        (speculator("dflash2", **BLOCK), "full vocabulary"),
        (speculator("mtp", num_nextn_predict_layers=2), "num_nextn_predict_layers"),
        (speculator("dflash", mask_token_id=9), "aux_hidden_state_layer_ids"),
        (speculator("dflash", aux_hidden_state_layer_ids=[2]), "mask_token_id"),
    ],
)  # fmt: skip
def test_format_rules(hf: dict[str, Any], gist: str) -> None:
    with pytest.raises(ConfigError, match=gist):
        convert_if_speculators(hf, "x")


def test_format_default_method_must_be_listed() -> None:
    hf = speculator("eagle3")
    hf["speculators_config"]["default_proposal_method"] = "tree"
    with pytest.raises(ConfigError, match="default_proposal_method"):
        convert_if_speculators(hf, "x")


class FromEntryPoint(NgramSpeculatorConfig):
    """What a plugin package would offer."""

    variant = "plugin"


class Point:
    """Stand-in for an installed entry point."""

    name = "plugin_method"

    @staticmethod
    def load() -> type[FromEntryPoint]:
        return FromEntryPoint


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def points(*, group: str) -> list[type[Point]]:
        asked.append(group)
        return [Point]

    monkeypatch.setattr(registry, "entry_points", points)
    monkeypatch.setattr(registry, "_custom", {})
    registry._load_entry_points.cache_clear()
    try:
        config = engine({"method": "plugin_method", "K": 3})
        assert config.speculative is not None
        assert config.speculative.speculator.variant == "plugin"
        assert registry.registered_speculative_methods() == ["plugin_method"]
        assert asked == ["paceline.speculative_methods"]
    finally:
        registry._load_entry_points.cache_clear()


def test_hub_ids_fail_fast_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def no_download(*args: Any, **kwargs: Any) -> str:
        raise AssertionError("the hub must not be asked")

    monkeypatch.setattr(facts_module, "reachable", lambda endpoint: False)
    monkeypatch.setattr(hub, "hf_hub_download", no_download)
    with pytest.raises(ConfigError, match="cached or reachable"):
        EngineArgs(model="nobody-has-this/model").resolve()
    with pytest.raises(ConfigError, match="does not exist here"):
        EngineArgs(model="not a model id").resolve()


def test_hub_files_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    import json

    hub = pytest.importorskip("huggingface_hub")
    (tmp_path / "config.json").write_text(json.dumps(dict(facts(TARGET))))

    def download(model: str, filename: str, revision: str | None) -> str:
        path = tmp_path / filename
        if not path.is_file():
            raise OSError("no such file on the hub")
        return str(path)

    monkeypatch.setattr(facts_module, "reachable", lambda endpoint: True)
    monkeypatch.setattr(hub, "hf_hub_download", download)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    config = EngineArgs(model="nobody-has-this/model", revision="r").resolve()
    assert (config.model.vocab_size, config.model.revision) == (32000, "r")


@pytest.mark.parametrize(
    ("given", "value", "reason"),
    [
        ({"device": "cpu"}, True, "a C compiler gives it for most models; the start tests it"),
        ({}, True, "depends on the device"),
        ({"device": "cuda"}, False, "not on GPUs"),
        ({"device": "cpu", "dtype": "bfloat16"}, False, "not in bfloat16"),
        ({"device": "cpu", "hf_overrides": {"head_dim": 20}}, False, "not with head_dim 20"),
        ({"device": "cpu", "block_size": 12}, True, "the start tests it"),
    ],
)
def test_what_is_known_of_equal_bits(given: dict[str, Any], value: bool, reason: str) -> None:
    (found,) = (d for d in engine(None, **given).decisions if d.field == "batch_invariant")
    assert found.value is value and reason in found.reason
