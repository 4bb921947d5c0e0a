"""MTP modules, DFlash, DSpark and XPress."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from specconfig.engine import EngineConfig
from specconfig.errors import ConfigError
from specconfig.formats.mtp_families import rewrite
from tests.unit.specconfig.catalog import (
    CATALOG,
    TARGET,
    dflash,
    dspark,
    engine,
    head,
    llama,
    spec,
    target,
    warnings_of,
    with_models,
)

MTP = {"method": "mtp"}


def next_tokens(config: EngineConfig) -> int:
    """Tokens past a prompt chunk that the drafter reads."""
    assert config.speculative is not None
    return config.speculative.speculator.num_prefill_lookahead_tokens


def test_mtp_takes_the_targets_weights() -> None:
    config = engine({**MTP, "K": 1}, model="ds/V3")
    assert config.draft_model is not None
    assert config.draft_model.model == "ds/V3"
    assert (config.draft_model.architecture, config.draft_model.model_type) == (
        "DeepSeekMTPModel", "deepseek_mtp",
    )  # fmt: skip
    assert (config.num_lookahead_tokens, next_tokens(config)) == (1, 1)
    assert config.num_hash_lookahead_tokens == 1
    assert config.drafter_implementation == "actors.draft.drafters.mtp:MtpDrafter"


@pytest.mark.parametrize(
    ("given", "quantization"),
    [
        pytest.param({**MTP, "K": 1}, "fp8", id="copied"),
        pytest.param({**MTP, "K": 1, "quantization": "awq"}, "awq", id="user-wins"),
        pytest.param({**MTP, "K": 1, "model": "ds/V3"}, None, id="explicit-model"),
    ],
)
def test_mtp_takes_weights_and_quantisation_from_where_they_are(
    given: dict[str, Any], quantization: str | None
) -> None:
    model = target("ds/V3").model_copy(update={"model_weights": "/w", "quantization": "fp8"})
    source = with_models({"/w": CATALOG["ds/V3"]})
    resolved = spec(given, target_config=model, source=source)
    assert resolved.draft_model_config is not None
    assert resolved.model == given.get("model", "/w")
    assert resolved.draft_model_config.quantization == quantization


@pytest.mark.parametrize(
    "given",
    [pytest.param(MTP), pytest.param({**MTP, "model": "ds/V3"})],
)
def test_K_from_n_predict(given: dict[str, Any]) -> None:
    assert spec(given, model="ds/V3").num_speculative_tokens == 1


@pytest.mark.parametrize(
    ("k", "prefill", "hashed"),
    [pytest.param(1, 1, 1, id="1"), pytest.param(2, 2, 2, id="2"),
     pytest.param(4, 4, 4, id="4")],
)  # fmt: skip
def test_several_modules_read_further_ahead(k: int, prefill: int, hashed: int) -> None:
    config = engine({**MTP, "K": k}, model="ds/V3-2")
    assert next_tokens(config) == prefill
    assert config.num_hash_lookahead_tokens == hashed
    assert config.speculative is not None
    assert ("multi" in config.speculative.speculator.variant) is (k > 1)


REFUSED = [
    ({**MTP, "K": 3}, "ds/V3-2", "must be divisible by n_predict=2"),
    ({**MTP, "K": 1}, None, "target_model_config must be present"),
    ({**MTP, "K": 1}, "ds/V41", "dspark"),
    ({**MTP, "model": "meta/tiny", "K": 3}, TARGET, "declares no MTP layers"),
    ({"model": "g/assistant", "K": 3, "draft_lm_head_quantization": "fp8"}, TARGET,
     "not supported"),
    ({"model": "n/parseaux", "K": 2}, TARGET, "1 for a ParseAuxMTPModel"),
    ({"method": "draft_model", "model": "org/some-dflash", "K": 3}, TARGET,
     "'draft_model'.*org/some-dflash.*'dflash'"),
    ({"method": "dflash", "model": "org/some-dflash"}, TARGET, "K was not"),
    ({"method": "dflash", "model": "org/dflash-block"}, TARGET, "K was not"),
    ({"method": "dflash", "model": "org/dflash-block", "K": 8}, TARGET,
     "at most 7"),
    ({"method": "dspark", "model": "org/dspark_no_block"}, TARGET, "K was not"),
    ({"method": "dspark", "model": "meta/tiny", "K": 3}, TARGET, "not a DSpark drafter"),
    ({"model": "org/dspark_x", "dspark_draft_topk": 20000}, TARGET, "16000"),
    ({"model": "org/dspark_x", "dspark_draft_topk": 0}, TARGET,
     "greater than or equal to 1"),
    ({"model": "org/EAGLE3-head", "K": 3, "dspark_draft_topk": 64}, TARGET,
     "only supported by DSpark"),
    ({"method": "ngram", "K": 3, "dspark_draft_topk": 64}, TARGET,
     "only supported by DSpark"),
    ({"method": "dspark", "dspark_draft_topk": 64}, "ds/V4",
     "Qwen3DSparkModel or Qwen3OmniDSparkModel"),
    ({"model": "org/dspark_wide"}, TARGET, "40000.*16000"),
    ({"model": "org/xpress-dflash", "K": 3, "xpress_topc": 99999}, TARGET, "32000"),
    ({"method": "dflash", "model": "org/some-dflash", "K": 3, "xpress_topc": 4},
     TARGET, "only supported by XPress"),
    ({"method": "ngram", "K": 3, "xpress_topc": 4}, TARGET,
     "only supported by XPress"),
    ({"model": "org/xpress-dflash", "K": 3,
                           "draft_sample_method": "probabilistic"}, TARGET, "one-hot"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "model", "gist"), REFUSED)
def test_refused(given: dict[str, Any], model: str | None, gist: str) -> None:
    with pytest.raises(ConfigError) as raised:
        spec(given, model=model)
    assert re.search(gist, str(raised.value), re.DOTALL), str(raised.value)


def test_repeated_modules_draw_a_warning() -> None:
    assert "acceptance drops" in warnings_of({**MTP, "K": 2}, model="ds/V3")


def test_deepseek_v4_has_an_mtp_module() -> None:
    draft = spec({**MTP, "K": 1}, model="ds/V4").draft_model_config
    assert draft is not None and draft.architecture == "DeepSeekV4MTPModel"


def test_mtp_is_inferred_from_the_checkpoint() -> None:
    assert spec({"model": "ds/V3", "K": 1}, model="ds/V3").method == "mtp"


def test_gemma4_mtp_keeps_no_kv() -> None:
    config = engine({"model": "g/assistant", "K": 3})
    assert config.speculative is not None and config.draft_model is not None
    assert config.speculative.method == "mtp"
    assert config.speculative.speculator.variant == "mtp gemma4"
    assert config.draft_model.hf_config["num_kv_shared_layers"] == 0
    assert next_tokens(config) == 1 and not config.draft_has_own_kv


def test_parse_aux_drafts_one_token() -> None:
    assert spec({"model": "n/parseaux", "K": 1}).method == "mtp"


def test_three_layers_draft_three_tokens() -> None:
    assert "acceptance drops" not in warnings_of({**MTP, "K": 3}, model="s/step3p5")
    resolved = spec({**MTP, "K": 3}, model="s/step3p5")
    assert resolved.speculator.variant == "mtp multi-module"


def test_index_share_reaches_the_draft_config() -> None:
    on = spec({**MTP, "K": 1, "index_share_for_mtp_iteration": True}, model="ds/V3")
    off = spec({**MTP, "K": 1}, model="ds/V3")
    assert on.draft_model_config is not None
    assert on.draft_model_config.hf_config["index_share_for_mtp_iteration"] is True
    assert off.draft_model_config != on.draft_model_config


def test_models_of_transformers_may_have_mtp_layers() -> None:
    resolved = spec({**MTP, "K": 2}, model="tf/mtp")
    assert resolved.draft_model_config is not None
    assert resolved.draft_model_config.architecture == "TransformersForMTP"
    assert resolved.draft_model_config.hf_config["n_predict"] == 2
    assert resolved.speculator.variant == "mtp"


@pytest.mark.parametrize(
    "model",
    [pytest.param("odd/empty-type", id="empty"), pytest.param("odd/moe-type", id="moe")],
)
def test_model_types_are_not_matched_by_substring(model: str) -> None:
    assert spec({"model": model, "K": 3}).method == "draft_model"


N = "num_nextn_predict_layers"
TEXT = {"text_config": {"model_type": "inner", N: 2, "hidden_size": 8}}
# (id, config, new model_type, n_predict, architecture, further keys)
REWRITES: list[tuple[str, dict[str, Any], str | None, int | None, str, dict[str, Any]]] = [
    ("parseaux", {"architectures": ["RadioMBartPrefixForCausalLM"],
                  "decoder": {"causal_vision_prefix": True}}, "mtp", 1, "ParseAuxMTPModel", {}),
    ("dots3", {"model_type": "dots3_note", "layer_types": ["full_attention"]},
     "dots3_note_mtp", 1, "Dots3NoteMTPModel",
     {"layer_types": ["full_attention", "sliding_attention"]}),
    ("deepseek_v3", {"model_type": "deepseek_v3", N: 1}, "deepseek_mtp", 1, "DeepSeekMTPModel", {}),
    ("deepseek_v3-none", {"model_type": "deepseek_v3"}, "deepseek_mtp", None,
     "DeepSeekMTPModel", {}),
    ("deepseek_v32", {"model_type": "deepseek_v32", N: 1}, "deepseek_mtp", 1,
     "DeepseekV32MTPModel", {}),
    ("glm_moe_dsa", {"model_type": "glm_moe_dsa", N: 1}, "deepseek_mtp", 1,
     "DeepseekV32MTPModel", {}),
    ("deepseek_v4", {"model_type": "deepseek_v4", N: 1}, "deepseek_mtp", 1,
     "DeepSeekV4MTPModel", {}),
    ("pangu", {"model_type": "pangu_ultra_moe", N: 1}, "pangu_ultra_moe_mtp", 1,
     "OpenPanguMTPModel", {}),
    ("kimi_k3", {"model_type": "kimi_k3", **TEXT}, "kimi_k3_mtp", 2, "KimiK3MTPModel", {}),
    ("mimo", {"architectures": ["MiMoForCausalLM"], N: 1}, "mimo_mtp", 1, "MiMoMTPModel",
     {"num_hidden_layers": 0}),
    ("mimo_v2", {"architectures": ["MiMoV2ForCausalLM"], N: 3}, "mimo_v2_mtp", 1,
     "MiMoV2MTPModel", {"num_hidden_layers": 0, N: 1}),
    ("mimo_v2_flash", {"architectures": ["MiMoV2FlashForCausalLM"]}, "mimo_v2_mtp", 1,
     "MiMoV2MTPModel", {N: 1}),
    ("mimo_v2_omni", {"architectures": ["MiMoV2OmniForCausalLM"]}, "mimo_v2_mtp", 1,
     "MiMoV2OmniMTPModel", {N: 1}),
    ("glm4_moe", {"architectures": ["Glm4MoeForCausalLM"], N: 1, "num_hidden_layers": 9},
     "glm4_moe_mtp", 1, "Glm4MoeMTPModel", {"num_hidden_layers": 9}),
    ("glm4_moe_lite", {"architectures": ["Glm4MoeLiteForCausalLM"], N: 1}, "glm4_moe_lite_mtp", 1,
     "Glm4MoeLiteMTPModel", {"num_hidden_layers": 0}),
    ("glm_ocr", {"architectures": ["GlmOcrForConditionalGeneration"], **TEXT}, "glm_ocr_mtp", 2,
     "GlmOcrMTPModel", {"num_hidden_layers": 0}),
    ("ernie", {"model_type": "ernie4_5_moe", N: 1}, "ernie_mtp", 1, "ErnieMTPModel", {}),
    ("nemotron_h", {"model_type": "nemotron_h", N: 2}, "nemotron_h_mtp", 2, "NemotronHMTPModel",
     {}),
    ("nemotron_h-none", {"model_type": "nemotron_h", "architectures": ["X"]}, "nemotron_h", None,
     "X", {}),
    ("qwen3_next", {"model_type": "qwen3_next", N: 1}, "qwen3_next_mtp", 1, "Qwen3NextMTP", {}),
    ("qwen4_exp", {"model_type": "qwen4_exp", "text_config": {
        "mtp_num_hidden_layers": 2, "hc_count": 4.0, "index_share_for_mtp_iteration": True}},
     "qwen4_exp_mtp", 2, "Qwen4ExpMTP", {"hc_mult": 4, "index_share_for_mtp_iteration": True}),
    ("qwen4_exp-nextn", {"model_type": "qwen4_exp_text", N: 3}, "qwen4_exp_mtp", 3,
     "Qwen4ExpMTP", {}),
    ("bailing_v3", {"architectures": ["BailingMoeV3ForCausalLM"], N: 1}, "bailing_hybrid_v3_mtp",
     1, "BailingMoeV3MTPModel", {}),
    ("bailing_v3_vl", {"architectures": ["BailingMoeV3VLForConditionalGeneration"], **TEXT,
                       "quantization_config": {"quant_method": "fp8"}},
     "bailing_hybrid_v3_mtp", 2, "BailingMoeV3MTPModel",
     {"hidden_size": 8, "quantization_config": {"quant_method": "fp8"}}),
    ("bailing_v25", {"model_type": "bailing_hybrid", N: 1}, "bailing_hybrid_mtp", 1,
     "BailingMoeV25MTPModel", {}),
    ("exaone_moe", {"model_type": "exaone_moe", N: 1}, "exaone_moe_mtp", 1, "ExaoneMoeMTP", {}),
    ("exaone4_5", {"model_type": "exaone4_5", N: 1}, "exaone4_5_mtp", 1, "Exaone4_5_MTP", {}),
    ("qwen3_5", {"model_type": "qwen3_5", "mtp_num_hidden_layers": 1}, "qwen3_5_mtp", 1,
     "Qwen3_5MTP", {}),
    ("qwen3_5_moe", {"model_type": "qwen3_5_moe", "text_config": {
        "mtp_num_hidden_layers": 1, "num_experts": 8}}, "qwen3_5_mtp", 1, "Qwen3_5MoeMTP", {}),
    ("intern_s2", {"model_type": "intern_s2_preview", "text_config": {
        "mtp_num_hidden_layers": 1}}, "qwen3_5_mtp", 1, "Qwen3_5MTP", {}),
    ("interns2_mobius", {"model_type": "interns2_mobius", "text_config": {
        "mtp_num_hidden_layers": 1}}, "qwen3_5_mtp", 1, "InternS2MobiusMTP", {}),
    ("longcat", {"model_type": "longcat_flash"}, "longcat_flash_mtp", 1, "LongCatFlashMTPModel",
     {}),
    ("step3p5", {"model_type": "step3p5", N: 3}, "step3p5_mtp", 3, "Step3p5MTP", {}),
    ("step3p7", {"model_type": "step3p7", **TEXT}, "step3p5_mtp", 2, "Step3p5MTP",
     {"hidden_size": 8}),
    ("step5", {"model_type": "step5"}, "step5_mtp", 1, "Step5MTP", {}),
    ("mistral_large", {"architectures": ["MistralLarge3ForCausalLM"], "model_type": "mistral3"},
     "mistral3", None, "EagleMistralLarge3ForCausalLM", {}),
    ("hy_v3", {"model_type": "hy_v3", N: 1}, "hy_v3_mtp", 1, "HYV3MTPModel", {}),
    ("hy_v4", {"model_type": "hy_v4", N: 1}, "hy_v4_mtp", 1, "HYV4MTPModel", {}),
    ("inkling", {"model_type": "inkling_model", "mtp_config": {
        N: 1, "chain_hidden_post_norm": True, "local_layer_ids": [0]}}, "inkling_mtp", 1,
     "InklingMTPModel", {"chain_hidden_post_norm": True, "local_layer_ids": [0]}),
    ("gemma4", {"model_type": "gemma4_assistant", "text_config": {"num_kv_shared_layers": 4}},
     "gemma4_mtp", 1, "Gemma4MTPModel", {"text_config": {"num_kv_shared_layers": 0}}),
    ("minimax_m3", {"model_type": "minimax_m3_vl", "text_config": {"hidden_size": 8}},
     "minimax_m3_mtp", 1, "MiniMaxM3MTP", {"hidden_size": 8}),
    ("minimax_m3-flat", {"architectures": ["MiniMaxM3MTP"], "num_mtp_modules": 2},
     "minimax_m3_mtp", 2, "MiniMaxM3MTP", {}),
    ("glm5_next", {"model_type": "glm5_next", "text_config": {
        N: 1, "index_share_for_mtp_iteration": True}}, "glm5_next_mtp", 1, "Glm5NextMTPModel",
     {"index_share_for_mtp_iteration": True}),
    ("muse_glimmer", {"model_type": "muse_glimmer_assistant", "architectures": ["X"]},
     "muse_glimmer_assistant", None, "X",
     {"dflash_config": {"causal": False}, "vocab_size": 202048}),
    ("probe", {"architectures": [""], "model_type": "dummy"}, "dummy", None, "", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("hf", "kind", "count", "arch", "extra"),
    [pytest.param(*row[1:], id=row[0]) for row in REWRITES],
)
def test_a_targets_config_becomes_its_modules_config(
    hf: dict[str, Any], kind: str | None, count: int | None, arch: str, extra: dict[str, Any]
) -> None:
    hf = copy.deepcopy(hf)
    rewrite(hf)
    assert hf["architectures"] == [arch]
    assert (hf.get("model_type"), hf.get("n_predict")) == (kind, count)
    assert {key: hf.get(key) for key in extra} == extra
    assert not any(key.startswith("__") for key in hf)


@pytest.mark.parametrize(
    ("hf", "gist"),
    [
        pytest.param({"model_type": "inkling_mm_model"}, "no MTP weights", id="inkling-none"),
        pytest.param({"model_type": "dots3_note", N: 2, "mtp_layer_types": ["full_attention"]},
                     "mtp_layer_types", id="dots3-length"),
    ],
)  # fmt: skip
def test_a_family_refuses_what_it_cannot_rewrite(hf: dict[str, Any], gist: str) -> None:
    with pytest.raises(ConfigError, match=gist):
        rewrite(hf)


def test_dflash_drafts_a_block_of_masks() -> None:
    config = engine({"method": "dflash", "model": "org/some-dflash", "K": 7})
    assert config.draft_model is not None and config.speculative is not None
    assert config.draft_model.architecture == "DFlashQwen3ForCausalLM"
    assert config.speculative.parallel_drafting is True
    assert (config.num_lookahead_tokens, next_tokens(config)) == (8, 1)
    assert (config.num_hash_lookahead_tokens, config.max_num_new_slots_for_drafting) == (0, 0)
    assert config.draft_law is not None and config.draft_law.num_next_tokens == 0
    assert config.speculative.mask_token_id == 7
    assert config.aux_hidden_state_layer_ids == (2, 16, 29)


def test_muse_glimmer_is_a_dflash_drafter() -> None:
    source = with_models({
        "org/muse": {**CATALOG["org/muse"], "vocab_size": 32000},
    })  # fmt: skip
    resolved = spec({"model": "org/muse", "K": 3}, source=source)
    assert resolved.method == "dflash" and resolved.draft_model_config is not None
    assert resolved.draft_model_config.architecture == "DFlashMuseGlimmerAssistantModel"
    assert resolved.draft_model_config.hf_config["dflash_config"]["causal"] is False


DSPARK = [
    ({"method": "dspark", "model": "org/dspark_x"}, 7, 7),
    ({"method": "dspark", "model": "org/dspark_fill", "K": 4}, 4, 5),
    ({"model": "org/dspark_qwen"}, 7, 7),
    ({"model": "org/dspark_only_block"}, 5, 5),
    ({"model": "org/dspark_n3", "K": 4}, 4, 4),
]


@pytest.mark.parametrize(("given", "k", "lookahead"), DSPARK)
def test_dspark(given: dict[str, Any], k: int, lookahead: int) -> None:
    config = engine(given)
    assert config.speculative is not None and config.draft_model is not None
    assert config.speculative.parallel_drafting is True
    assert (config.num_speculative_tokens, config.num_lookahead_tokens) == (k, lookahead)
    assert config.draft_model.architecture == "Qwen3DSparkModel"


@pytest.mark.parametrize(
    ("model", "arch", "kind", "quantization"),
    [pytest.param("ds/V4", "DSparkDraftModel", "deepseek_v4", "fp8", id="v4"),
     pytest.param("ds/V41", "DSparkV41DraftModel", "deepseek_v41", None, id="v41")],
)  # fmt: skip
def test_dspark_inside_a_target_checkpoint(
    model: str, arch: str, kind: str, quantization: str | None
) -> None:
    chosen = target(model).model_copy(update={"model_weights": "/w"})
    resolved = spec(
        {"method": "dspark", "K": 5}, target_config=chosen,
        source=with_models({"/w": CATALOG[model]}),
    )  # fmt: skip
    draft = resolved.draft_model_config
    assert draft is not None
    assert (draft.model, draft.architecture, draft.model_type) == ("/w", arch, kind)
    assert draft.quantization == quantization


def test_dspark_K_is_the_block_size() -> None:
    assert spec({"method": "dspark"}, model="ds/V4").num_speculative_tokens == 5


def test_dspark_topk_reaches_the_draft_config() -> None:
    resolved = spec({"model": "org/dspark_x", "dspark_draft_topk": 64})
    assert resolved.draft_model_config is not None
    assert resolved.draft_model_config.hf_config["dspark_draft_topk"] == 64


@pytest.mark.parametrize(
    ("asked", "expected"),
    [pytest.param(None, 64, id="checkpoint"), pytest.param(0, 0, id="full-vocab")],
)
def test_xpress_candidates(asked: int | None, expected: int) -> None:
    resolved = spec({"model": "org/xpress-dflash", "K": 3, "xpress_topc": asked})
    assert resolved.draft_model_config is not None
    assert resolved.draft_model_config.hf_config["xpress_topc"] == expected


@pytest.mark.parametrize(
    "model",
    [pytest.param("org/neutral-gemma", id="gemma4"),
     pytest.param("org/neutral-muse", id="muse"),
     pytest.param("org/neutral-k3", id="k3-ours-by-architecture")],
)  # fmt: skip
def test_dspark_is_found_by_architecture(model: str) -> None:
    resolved = spec({"model": model})
    assert resolved.method == "dspark" and resolved.draft_model_config is not None
    if model == "org/neutral-gemma":
        hf = resolved.draft_model_config.hf_config
        assert hf["dspark_target_layer_ids"] == [3, 9]
        assert resolved.aux_hidden_state_layer_ids == (4, 10)


@pytest.mark.parametrize(
    ("model", "arch", "variant"),
    [
        pytest.param("org/dflash2-head", "DFlash2DraftModel", "dflash2", id="dflash2"),
        pytest.param("org/lilicorr", "LiLiCorrDraftModel", "lilicorr", id="lilicorr"),
        pytest.param("org/dflash-mixed", "DFlashDraftModel", "dflash", id="mixed"),
    ],
)
def test_dflash_variants_by_architecture(model: str, arch: str, variant: str) -> None:
    resolved = spec({"method": "dflash", "model": model, "K": 3})
    assert resolved.draft_model_config is not None
    assert resolved.draft_model_config.architecture == arch
    assert resolved.speculator.variant == variant


OMNI_TEXT = llama(num_hidden_layers=8)
OMNI_TARGET = {
    "model_type": "qwen3_omni_moe", "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "thinker_config": {"text_config": OMNI_TEXT},
}  # fmt: skip
OMNI_DRAFT = dspark(
    architectures=["Qwen3OmniDSparkModel"], target_hidden_size=4096, target_layer_ids=[1, 4, 7],
    use_aux_hidden_state=True, markov_rank=4, markov_head_type="vanilla", sample_from_anchor=True,
    dspark_bonus_anchor=False,
)  # fmt: skip
OMNI_BREAKS: list[tuple[str, Any]] = [
    ("architectures", ["Qwen3DSparkModel"]), ("block_size", "7"), ("target_hidden_size", 1),
    ("hidden_size", 2048), ("num_attention_heads", 16), ("num_key_value_heads", 4),
    ("head_dim", 64), ("target_layer_ids", []), ("target_layer_ids", [4, 1]),
    ("target_layer_ids", [1, 8]), ("use_aux_hidden_state", 1), ("markov_rank", 0),
    ("markov_rank", True), ("markov_head_type", "gated"), ("sample_from_anchor", False),
    ("dspark_bonus_anchor", True), ("draft_vocab_size", 40000), ("mask_token_id", 32000),
    ("rope_scaling", {"rope_type": "default", "mrope_section": [1]}),
]  # fmt: skip


def test_an_omni_drafter_that_fits_is_accepted() -> None:
    source = with_models({"q/omni": OMNI_TARGET, "q/omni-dspark": OMNI_DRAFT})
    config = engine({"model": "q/omni-dspark", "K": 7}, model="q/omni", source=source)
    assert config.num_lookahead_tokens == 7


@pytest.mark.parametrize(
    ("key", "value"), [pytest.param(k, v, id=f"{k}-{v}") for k, v in OMNI_BREAKS]
)
def test_an_omni_drafter_must_fit_its_target(key: str, value: Any) -> None:
    source = with_models({"q/omni": OMNI_TARGET, "q/omni-dspark": {**OMNI_DRAFT, key: value}})
    with pytest.raises(ConfigError, match=r"Qwen3-Omni DSpark|mask_token_id|target_layer_ids"):
        engine({"model": "q/omni-dspark", "K": 7}, model="q/omni", source=source)


def test_an_omni_drafters_K_is_its_block() -> None:
    source = with_models({"q/omni": OMNI_TARGET, "q/omni-dspark": OMNI_DRAFT})
    with pytest.raises(ConfigError, match="Qwen3-Omni DSpark: num_speculative_tokens=3"):
        engine({"model": "q/omni-dspark", "K": 3}, model="q/omni", source=source)


DFLASH = {"method": "dflash", "model": "org/some-dflash", "K": 7}


@pytest.mark.parametrize(
    ("tokens", "active"),
    [pytest.param(1024, 128, id="1024"), pytest.param(9, 1, id="9")],
)
def test_block_drafters_cap_active_requests(tokens: int, active: int) -> None:
    config = engine(DFLASH, max_num_batched_tokens=tokens, max_num_seqs=256)
    assert (config.max_num_draft_seqs, config.max_num_active_seqs) == (active, active)
    assert f"only {active} of max_num_seqs=256" in "\n".join(config.warnings)


def test_a_step_too_small_for_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="not enough slots"):
        engine(DFLASH, max_num_batched_tokens=8, max_num_seqs=256)


def test_mtp_head_in_its_own_directory() -> None:
    source = with_models({"own/head": head(model_type="mimo", architectures=["MiMoForCausalLM"],
                                           num_nextn_predict_layers=1)})  # fmt: skip
    resolved = spec({"model": "own/head", "K": 1}, source=source)
    assert resolved.method == "mtp" and resolved.draft_model_config is not None
    assert resolved.speculator.num_draft_kv_layers == 1


def test_dflash_from_the_anchor_is_refused() -> None:
    hf = dflash(dflash_config={"mask_token_id": 7, "sample_from_anchor": True})
    with pytest.raises(ConfigError, match="sample_from_anchor"):
        spec({"model": "org/dflash-a", "K": 3}, source=with_models({"org/dflash-a": hf}))


def test_medusa() -> None:
    config = engine({"method": "medusa", "model": "org/medusa-head"})
    assert (config.num_speculative_tokens, config.num_lookahead_tokens) == (4, 0)
    assert config.draft_law is not None
    assert not config.draft_has_own_kv and config.draft_law.reads_target_states
    assert config.draft_model is not None and config.draft_model.architecture == "MedusaModel"
    with pytest.raises(ConfigError, match="at most 4"):
        engine({"method": "medusa", "model": "org/medusa-head", "K": 5})
