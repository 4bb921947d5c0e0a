"""Separate draft models, parallel layout, and the EAGLE family."""

from __future__ import annotations

import copy
import re
from operator import attrgetter
from typing import Any

import pytest

from specconfig.engine_args import EngineArgs
from specconfig.errors import ConfigError
from specconfig.facts.model_facts import rope_types
from specconfig.speculators.draft_config import CACHE_ONLY_ROPE
from tests.unit.specconfig.catalog import (
    CATALOG,
    TARGET,
    engine,
    facts,
    llama,
    spec,
    target,
    warnings_of,
    with_models,
)

TINY = {"model": "meta/tiny", "K": 3}
EAGLE3 = {"model": "org/EAGLE3-head", "K": 3}

ENGINE_VALUES = [
    (TINY, {}, {
        "num_lookahead_tokens": 3, "draft_law.num_next_tokens": 0,
        "max_num_new_slots_for_drafting": 1, "drafter_host": "draft",
        "draft_placement": "colocated", "draft_has_own_kv": True}),
    ({"model": "meta/tiny-pard", "K": 5, "parallel_drafting": True}, {}, {
        "num_lookahead_tokens": 5, "max_num_new_slots_for_drafting": 5}),
    ({"method": "pard", "model": "meta/tiny-pard", "K": 5}, {}, {
        "num_lookahead_tokens": 5, "max_num_new_slots_for_drafting": 5}),
    ({"method": "eagle", "model": "org/eagle-head", "K": 3}, {}, {
        "num_lookahead_tokens": 3, "draft_law.num_next_tokens": 1,
        "num_hash_lookahead_tokens": 1, "max_num_new_slots_for_drafting": 0,
        "draft_law.reads_target_states": True, "use_block_drop": False,
        "drafter_host": "target", "draft_placement": None}),
    ({"method": "eagle3", "model": "org/peagle3", "K": 6, "parallel_drafting": True}, {}, {
        "num_lookahead_tokens": 6, "max_num_new_slots_for_drafting": 5,
        "draft_law.num_next_tokens": 1}),
    ({"method": "peagle", "model": "org/peagle3", "K": 6}, {}, {
        "num_lookahead_tokens": 6, "max_num_new_slots_for_drafting": 5,
        "draft_law.num_next_tokens": 1}),
    ({**EAGLE3, "disable_eagle_block_drop": True}, {}, {
        "use_block_drop": False, "draft_law.num_next_tokens": 1,
        "num_hash_lookahead_tokens": 0}),
    ({**EAGLE3, "disable_lookahead_block_hashes": True}, {}, {
        "num_hash_lookahead_tokens": 0, "use_block_drop": True}),
    (EAGLE3, {"enable_prefix_caching": False}, {
        "num_hash_lookahead_tokens": 0, "use_block_drop": True}),
]  # fmt: skip


@pytest.mark.parametrize(("given", "args", "expected"), ENGINE_VALUES)
def test_engine_values(
    given: dict[str, Any], args: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = engine(given, **args)
    assert {name: attrgetter(name)(config) for name in expected} == expected


METHODS = [
    (TINY, "draft_model", None),
    ({"model": "org/eagle-head", "K": 3}, "eagle", "EagleLlamaForCausalLM"),
    (EAGLE3, "eagle3", "Eagle3LlamaForCausalLM"),
    ({"model": "org/eagle-eagle3-x", "K": 3}, "eagle", None),
    ({"model": "org/foo_eagle3_dflash", "K": 3}, "eagle3", None),
    ({"model": "org/dspark_x-eagle3", "K": 3}, "eagle3", None),
    # 0.33 misses the underscore and serves the head as a whole model.
    ({"model": "org/eagle_head", "K": 3}, "eagle", None),
    ({"method": "eagle3", "model": "org/named-eagle3-arch", "K": 3}, "eagle3",
     "LlamaForCausalLMEagle3"),
    ({"method": "eagle", "model": "org/eagle-mistral-large", "K": 3}, "eagle",
     "EagleMistralLarge3ForCausalLM"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "method", "arch"), METHODS)
def test_method(given: dict[str, Any], method: str, arch: str | None) -> None:
    resolved = spec(given)
    assert resolved.method == method and resolved.draft_model_config is not None
    if arch is not None:
        assert resolved.draft_model_config.architecture == arch


REFUSED = [
    ({"model": "meta/tiny"}, {}, "'meta/tiny' was given, K was not"),
    ({"model": "meta/tiny-vocab", "K": 3}, {}, "32000.*30000"),
    ({"model": "meta/tiny-vocab", "K": 3, "use_heterogeneous_vocab": True,
                          "draft_sample_method": "probabilistic"}, {}, "greedy"),
    ({"model": "meta/tiny-vocab", "K": 3, "use_heterogeneous_vocab": True,
                   "use_local_argmax_reduction": True}, {}, "full logits"),
    ({"method": "ngram", "K": 3, "use_heterogeneous_vocab": True}, {},
     "only with method 'draft_model'"),
    ({**TINY, "parallel_drafting": True}, {},
     "dflash_config.mask_token_id.*mask_token_id.*dspark_noise_token_id.*pard_token.*ptd_token_id"),
    ({**TINY, "draft_tensor_parallel_size": 2}, {"tensor_parallel_size": 4},
     "draft_tensor_parallel_size.*1 or 4"),
    ({**TINY, "draft_tensor_parallel_size": 3}, {"tensor_parallel_size": 4}, "=4"),
    ({**TINY, "draft_tensor_parallel_size": 0}, {"tensor_parallel_size": 4},
     "greater than or equal to 1"),
    ({"model": "meta/six-heads", "K": 3}, {"tensor_parallel_size": 4}, "6 attention heads"),
    ({"method": "mtp", "model": "org/EAGLE3-head", "K": 3}, {},
     "'mtp'.*org/EAGLE3-head.*'eagle3'"),
    ({"method": "eagle", "model": "meta/tiny", "K": 3}, {}, "complete language model"),
    ({"model": "org/n3-eagle3", "K": 4}, {}, "must be divisible by n_predict=3"),
    ({"model": "org/eagle3-head-fp32", "K": 3,
                       "draft_lm_head_quantization": "nvfp4"}, {},
     "lm_head must run in model dtype bfloat16, got float32"),
    ({"method": "ngram", "K": 3, "draft_lm_head_quantization": "fp8"}, {},
     "not supported"),
    ({"method": "dflash", "model": "org/some-dflash", "K": 3,
                    "draft_lm_head_quantization": "fp8"}, {}, "not supported"),
    ({**EAGLE3, "draft_lm_head_quantization": "int8"}, {}, "'fp8' or 'nvfp4'"),
    ({**EAGLE3, "index_share_for_mtp_iteration": True}, {},
     "only supported with method='mtp'"),
    ({"method": "ngram", "K": 3, "index_share_for_mtp_iteration": False}, {},
     "only supported with method='mtp'"),
    ({**EAGLE3, "max_model_len": 4000}, {}, "4000.*2048"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "parallel", "gist"), REFUSED)
def test_refused(given: dict[str, Any], parallel: dict[str, Any], gist: str) -> None:
    with pytest.raises(ConfigError) as raised:
        spec(given, **parallel)
    assert re.search(gist, str(raised.value), re.DOTALL), str(raised.value)


def test_a_draft_inherits_length_and_tokenizer() -> None:
    draft = spec(TINY).draft_model_config
    assert draft is not None
    assert (draft.max_model_len, draft.tokenizer) == (8192, TARGET)


def test_heterogeneous_vocab_uses_the_drafts_tokenizer() -> None:
    given = {"model": "meta/tiny-vocab", "K": 3, "use_heterogeneous_vocab": True, "revision": "r9"}
    draft = spec(given).draft_model_config
    assert draft is not None
    assert (draft.tokenizer, draft.tokenizer_revision) == ("meta/tiny-vocab", "r9")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [pytest.param(None, 4, id="None"), pytest.param(1, 1, id="1"),
     pytest.param(4, 4, id="4")],
)  # fmt: skip
def test_a_draft_is_split_like_the_target_or_not_at_all(asked: int | None, expected: int) -> None:
    resolved = spec({**TINY, "draft_tensor_parallel_size": asked}, tensor_parallel_size=4)
    assert resolved.draft_parallel_config is not None
    assert resolved.draft_parallel_config.tensor_parallel_size == expected


@pytest.mark.parametrize(
    ("draft", "expected"),
    [pytest.param("meta/tiny", False, id="dense"),
     pytest.param("meta/tiny-moe", True, id="moe")],
)  # fmt: skip
def test_only_moe_drafts_spread_experts(draft: str, expected: bool) -> None:
    # PP 2 and a backend to copy do not exist here: stages are refused, Ray is the only launcher.
    resolved = spec({"model": draft, "K": 3}, enable_expert_parallel=True)
    assert resolved.draft_parallel_config is not None
    assert resolved.draft_parallel_config.enable_expert_parallel is expected
    assert resolved.draft_parallel_config.pipeline_parallel_size == 1


def test_pipeline_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        EngineArgs(model=TARGET, pipeline_parallel_size=2)


def test_one_rank_needs_no_split_of_heads() -> None:
    given = {"model": "meta/six-heads", "K": 3, "draft_tensor_parallel_size": 1}
    assert spec(given, tensor_parallel_size=4).draft_tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("length", "gist"),
    [pytest.param(6000, "target's max_model_len", id="over-target"),
     pytest.param(9999, "8192", id="over-derived")],
)  # fmt: skip
def test_a_draft_limit_beyond_a_model_is_refused(length: int, gist: str) -> None:
    with pytest.raises(ConfigError, match=gist) as raised:
        spec({**TINY, "max_model_len": length}, target_args={"max_model_len": 4096})
    assert str(length) in str(raised.value)


def test_drafting_stops_at_the_given_limit() -> None:
    config = engine({**TINY, "max_model_len": 1024}, max_model_len=4096)
    assert config.draft_model is not None and config.draft_model.max_model_len == 1024
    # Asking for a shorter draft is asking to skip drafts, not to serve shorter sequences.
    assert (config.max_model_len, config.draft_max_model_len) == (4096, 1024)


def test_a_draft_is_no_longer_than_the_target() -> None:
    draft = spec(TINY, target_args={"max_model_len": 4096}).draft_model_config
    assert draft is not None and draft.max_model_len == 4096


def test_a_shorter_draft_checkpoint_caps_the_target() -> None:
    # Draft ranks index RoPE and blocks at target positions.
    config = engine({"model": "meta/tiny-short", "K": 3})
    assert config.draft_model is not None
    assert config.draft_model.hf_config["max_position_embeddings"] == 2048
    assert (config.max_model_len, config.draft_max_model_len) == (2048, 2048)
    assert "lowered from 8192 to 2048" in "\n".join(config.warnings)


def test_the_cap_can_be_traded_for_undrafted_tails() -> None:
    config = engine({"model": "meta/tiny-short", "K": 3, "max_model_len": 2048})
    assert (config.max_model_len, config.draft_max_model_len) == (8192, 2048)


def test_dict_overrides_do_not_reach_the_draft() -> None:
    config = engine({"model": "meta/deep", "K": 3}, hf_overrides={"num_hidden_layers": 2},
                    source=with_models({"meta/deep": llama()}))  # fmt: skip
    assert config.draft_model is not None
    assert (config.model.num_hidden_layers, config.draft_model.num_hidden_layers) == (2, 32)


def test_where_draft_fields_come_from() -> None:
    given = {**TINY, "revision": "r1", "quantization": "awq", "max_model_len": 128}
    draft = spec(given, target_args={"dtype": "float16"}).draft_model_config
    assert draft is not None
    assert (draft.revision, draft.quantization, draft.max_model_len) == ("r1", "awq", 128)
    assert draft.dtype == "float16"


def test_enforce_eager_concerns_the_draft_alone() -> None:
    eager, plain = spec({**TINY, "enforce_eager": True}), spec(TINY)
    assert eager.enforce_eager is True
    assert eager.draft_model_config == plain.draft_model_config


def test_an_mtp_checkpoint_may_be_an_explicit_draft_model() -> None:
    with pytest.raises(ConfigError, match=r"'draft_model'.*ds/V3.*'mtp'"):
        spec({"method": "draft_model", "model": "ds/V3", "K": 1}, model="ds/V3")


def test_a_checkpoint_drafter_needs_a_target() -> None:
    with pytest.raises(ConfigError, match="target_model_config must be present"):
        spec({"model": "meta/tiny", "K": 2}, model=None)


def test_one_draft_rank_beside_four_target_ranks() -> None:
    # A draft hands token ids to the target, so the degrees need not be equal.
    config = engine({**TINY, "draft_tensor_parallel_size": 1}, tensor_parallel_size=4)
    assert config.draft_parallel is not None
    assert config.draft_parallel.tensor_parallel_size == 1


def test_positions_of_a_head_are_lifted_lengths_are_not() -> None:
    resolved = spec({"method": "eagle", "model": "org/eagle-head", "K": 3})
    draft = resolved.draft_model_config
    assert draft is not None
    assert (draft.architecture, draft.model_type) == ("EagleLlamaForCausalLM", "eagle")
    assert draft.hf_config["max_position_embeddings"] == 8192
    assert draft.max_model_len == 2048
    assert resolved.draft_shares_target_positions and resolved.use_eagle_block_drop
    assert CATALOG["org/eagle-head"]["max_position_embeddings"] == 2048
    config = engine({"method": "eagle", "model": "org/eagle-head", "K": 3})
    assert (config.max_model_len, config.draft_max_model_len) == (8192, 8192)


def test_yarn_positions_are_not_lifted() -> None:
    config = engine({"model": "org/yarn-eagle3", "K": 3})
    assert config.draft_model is not None and config.speculative is not None
    assert config.draft_model.hf_config["max_position_embeddings"] == 2048
    assert not config.speculative.draft_shares_target_positions
    assert config.max_model_len == 2048


ROPE_SAFE: list[tuple[str, Any]] = [
    ("none", None),
    ("empty", {}),
    ("missing-type", {"rope_theta": 1e4}),
    ("default", {"rope_type": "default"}),
    ("linear", {"rope_type": "linear", "factor": 2.0}),
    ("llama3", {"rope_type": "llama3"}),
    ("ntk", {"rope_type": "ntk"}),
    ("proportional", {"rope_type": "proportional"}),
    ("nested", {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}),
]
ROPE_UNSAFE: list[tuple[str, Any]] = [
    *((kind, {"rope_type": kind})
      for kind in ("yarn", "deepseek_yarn", "dynamic", "longrope", "mrope")),
    ("nested-one-yarn", {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {}}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("params", "safe"),
    [pytest.param(p, True, id=i) for i, p in ROPE_SAFE]
    + [pytest.param(p, False, id=i) for i, p in ROPE_UNSAFE],
)
def test_rope_matrix(params: Any, safe: bool) -> None:
    hf = copy.deepcopy(CATALOG["org/eagle-head"])
    del hf["rope_scaling"]
    if params is not None:
        hf["rope_parameters"] = params
    assert (set(rope_types(hf)) <= CACHE_ONLY_ROPE) is safe
    source = with_models({"org/eagle-rope": hf})
    resolved = spec({"model": "org/eagle-rope", "K": 3}, source=source)
    assert resolved.draft_shares_target_positions is safe


@pytest.mark.parametrize(
    ("asked", "expected"),
    [pytest.param(None, 3, id="None"), pytest.param(2, 2, id="2"),
     pytest.param(6, 6, id="6")],
)  # fmt: skip
def test_K_repeats_the_checkpoints_own_count(asked: int | None, expected: int) -> None:
    assert spec({"model": "org/n3-eagle3", "K": asked}).num_speculative_tokens == expected


def test_keeping_tail_blocks_warns_that_it_is_experimental() -> None:
    assert "experimental" in warnings_of({**EAGLE3, "disable_eagle_block_drop": True})


def test_a_quantised_head_copy_is_kept() -> None:
    assert spec({**EAGLE3, "draft_lm_head_quantization": "fp8"}).draft_lm_head_quantization == "fp8"


def test_targets_are_not_changed_by_drafts() -> None:
    model = target()
    before = model.model_dump()
    spec(EAGLE3, target_config=model)
    assert model.model_dump() == before
    assert facts(TARGET) == CATALOG[TARGET]
