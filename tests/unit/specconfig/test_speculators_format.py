"""Short flags, and checkpoints in the speculators format."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from specconfig.engine_args import EngineArgs
from specconfig.engine_fields import merge_flags
from specconfig.errors import ConfigError
from specconfig.formats.speculators import convert_if_speculators
from tests.unit.specconfig.catalog import (
    BLOCK,
    CATALOG,
    TARGET,
    engine,
    facts,
    head,
    llama,
    spec,
    speculator,
    with_models,
)

K3 = {"num_speculative_tokens": 3}


def args(**kwargs: Any) -> EngineArgs:
    return EngineArgs(model=TARGET, **kwargs)


def serve(hf: dict[str, Any], **kwargs: Any) -> Any:
    """An engine whose `model` is the given speculator."""
    return engine(kwargs.pop("given", None), model="sp/x", source=with_models({"sp/x": hf}),
                  **kwargs)  # fmt: skip


def test_nothing_given_is_plain_decoding() -> None:
    assert args().resolve(facts).speculative is None
    assert merge_flags(args()) is None


def test_flags_alone_are_a_config() -> None:
    config = args(spec_method="ngram", spec_tokens=3).resolve(facts)
    assert config.speculative is not None
    assert (config.speculative.method, config.num_speculative_tokens) == ("ngram", 3)


@pytest.mark.parametrize(
    ("kwargs", "gist"),
    [
        pytest.param({"speculative_config": K3, "spec_tokens": 5},
                     "--spec-tokens and speculative_config\\['num_speculative_tokens'\\]",
                     id="tokens"),
        pytest.param({"speculative_config": {"method": None}, "spec_method": "ngram"},
                     "--spec-method and speculative_config\\['method'\\]", id="null"),
        pytest.param({"speculative_config": {"num-speculative-tokens": 3}, "spec_tokens": 5},
                     "mutually exclusive", id="hyphens-do-not-escape"),
    ],
)  # fmt: skip
def test_exclusive(kwargs: dict[str, Any], gist: str) -> None:
    with pytest.raises(ConfigError, match=gist):
        args(**kwargs).resolve(facts)


def test_flags_and_hyphenated_keys_merge() -> None:
    config = args(speculative_config={"method": "ngram", "num-speculative-tokens": 3})
    assert config.resolve(facts).num_speculative_tokens == 3


def test_injected_keys_are_dropped() -> None:
    given = {"method": "ngram", "K": 3, "target_model_config": "mine",
             "target_parallel_config": "mine"}  # fmt: skip
    assert spec(given) == spec({"method": "ngram", "K": 3})


def test_merging_flags_is_idempotent_and_pure() -> None:
    given = {"prompt_lookup_max": 4}
    before = copy.deepcopy(given)
    one = args(speculative_config=given, spec_method="ngram", spec_tokens=3)
    assert one.resolve(facts) == one.resolve(facts)
    assert given == before


def test_a_speculator_as_model_names_its_target() -> None:
    config = engine(None, model="sp/eagle3")
    assert (config.model.model, config.model.tokenizer) == ("meta/verifier", "meta/verifier")
    assert config.speculative is not None
    assert (config.speculative.method, config.num_speculative_tokens) == ("eagle3", 5)
    assert config.speculative.model == "sp/eagle3"


def test_user_values_win_over_a_speculators() -> None:
    given = {"K": 2, "attention_backend": "sdpa"}
    config = engine(given, model="sp/eagle3")
    assert config.speculative is not None
    assert config.num_speculative_tokens == 2
    assert config.speculative.attention_backend == "SDPA"


def test_method_and_model_of_a_speculator_are_pinned() -> None:
    config = engine({"method": "ngram", "model": "other"}, model="sp/eagle3")
    assert config.speculative is not None
    assert (config.speculative.method, config.speculative.model) == ("eagle3", "sp/eagle3")
    warned = "\n".join(config.warnings)
    assert "speculative_config.method is replaced" in warned
    assert "speculative_config.model is replaced" in warned


@pytest.mark.parametrize(
    ("model", "method", "parallel"),
    [
        pytest.param("sp/peagle", "eagle3", True, id="peagle"),
        pytest.param("sp/dflash2", "dflash", True, id="dflash2"),
        pytest.param("sp/dflash", "dflash", True, id="dflash"),
        pytest.param("sp/dspark", "dspark", True, id="dspark"),
        pytest.param("sp/eagle3", "eagle3", False, id="eagle3"),
    ],
)
def test_speculator_types_become_methods(model: str, method: str, parallel: bool) -> None:
    config = engine(None, model=model)
    assert config.speculative is not None
    assert config.speculative.method == method
    assert config.speculative.parallel_drafting is parallel


def test_a_peagle_speculator_is_parallel() -> None:
    with pytest.raises(ConfigError, match="parallel_drafting"):
        engine({"parallel_drafting": False}, model="sp/peagle")


def broken(path: str, value: Any = None, *, drop: bool = True) -> dict[str, Any]:
    hf = speculator("eagle3")
    place: Any = hf
    *parents, last = path.split(".")
    for part in parents:
        place = place[int(part) if part.isdigit() else part]
    if drop:
        del place[last]
    else:
        place[last] = value
    return hf


STRUCTURE = [
    (broken("speculators_config.proposal_methods"), "Invalid speculators config"),
    (broken("speculators_config.proposal_methods", [], drop=False),
     "Invalid speculators config"),
    (broken("speculators_config.verifier"), "Invalid speculators config"),
    (broken("speculators_config.verifier.name_or_path"), "Invalid speculators config"),
    (broken("speculators_model_type"), "Invalid speculators config"),
    (broken("speculators_config.proposal_methods.0.speculative_tokens"),
     "Invalid speculators config"),
    (speculator("eagle3", tokens=None), "Missing 'speculative_tokens'"),
    (broken("transformer_layer_config"), "Must provide"),
    # 0.33 raises TypeError here; ours stays in the ConfigError tree.
    (broken("transformer_layer_config", [], drop=False), "not a list"),
    *((speculator("eagle3", target=name), "remote model repository")
      for name in ("/tmp/nowhere-to-be-found", "./local", None, "a/b/c")),
    (speculator("eagle3", transformer_layer_config={
        **speculator("eagle3")["transformer_layer_config"], "model_type": "mistral"}), "mistral"),
    (speculator("peagle"), "mask_token_id"),
    (speculator("mlp"), "expected one of"),
    (speculator("eagle3", tokens=0), "positive integer"),
]  # fmt: skip


@pytest.mark.parametrize(("hf", "gist"), STRUCTURE)
def test_structure(hf: dict[str, Any], gist: str) -> None:
    with pytest.raises(ConfigError, match=gist):
        serve(hf)


def test_the_first_proposal_method_counts() -> None:
    hf = speculator("eagle3", tokens=3)
    hf["speculators_config"]["proposal_methods"].append({"speculative_tokens": 9})
    assert serve(hf).num_speculative_tokens == 3


def test_an_existing_local_target_is_fine(tmp_path: Path) -> None:
    hf = speculator("eagle3", target=str(tmp_path))
    config = engine(None, model="sp/x", source=with_models({"sp/x": hf, str(tmp_path): llama()}))
    assert config.model.model == str(tmp_path)


@pytest.mark.parametrize(
    "hf",
    [pytest.param(llama(speculators_config=None), id="null"),
     pytest.param({**llama(), "speculators_config": None}, id="explicit-null"),
     pytest.param(llama(), id="absent")],
)  # fmt: skip
def test_other_checkpoints_pass_through(hf: dict[str, Any]) -> None:
    config = serve(hf)
    assert config.model.model == "sp/x" and config.speculative is None


def test_single_files_are_not_speculators(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"")
    hf = {**llama(), **speculator("eagle3")}
    config = engine(None, model=str(file), source=with_models({str(file): hf}))
    assert config.speculative is None


def test_eagle3_speculators_have_defaults() -> None:
    out = convert_if_speculators(copy.deepcopy(CATALOG["sp/eagle3"]), "x")
    assert out["architectures"] == ["Eagle3LlamaForCausalLM"]
    wanted = {"draft_vocab_size": 16000, "norm_before_residual": True, "norm_before_fc": False,
              "fc_norm": False, "norm_output": False}  # fmt: skip
    assert {key: out[key] for key in wanted} == wanted
    assert "target_hidden_size" not in out


def test_eagle3_of_qwen3_with_default_taps() -> None:
    hf = speculator("eagle3", eagle_aux_hidden_state_layer_ids=[])
    hf["transformer_layer_config"]["model_type"] = "qwen3"
    out = convert_if_speculators(hf, "x")
    assert out["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    assert "eagle_aux_hidden_state_layer_ids" not in out


def test_peagle_speculators_need_their_mask() -> None:
    out = convert_if_speculators(speculator("peagle", mask_token_id=9), "x")
    assert (out["pard_token"], out["norm_before_residual"]) == (9, False)
    assert out["architectures"] == ["PeagleLlamaForCausalLM"]
    assert engine(None, model="sp/peagle").max_num_new_slots_for_drafting == 4


@pytest.mark.parametrize(
    ("flag", "causal"), [pytest.param(None, False), pytest.param(False, True, id="f")]
)
def test_dflash_speculators_become_dflash_configs(flag: bool | None, causal: bool) -> None:
    changes = {} if flag is None else {"sliding_window_non_causal": flag}
    out = convert_if_speculators(speculator("dflash", **BLOCK, **changes), "x")
    assert out["dflash_config"] == {
        "mask_token_id": 9, "target_layer_ids": [1, 4], "sample_from_anchor": False,
        "causal": causal,
    }  # fmt: skip
    assert out["eagle_aux_hidden_state_layer_ids"] == [2, 5]


def test_dflash2_speculators_keep_their_selector() -> None:
    out = convert_if_speculators(copy.deepcopy(CATALOG["sp/dflash2"]), "x")
    assert out["architectures"] == ["DFlash2DraftModel"]
    assert out["dflash_config"]["conv_kernel_size"] == 2
    assert "selector_top_k" not in out["dflash_config"]


@pytest.mark.parametrize(
    ("anchor", "extra"),
    [pytest.param(None, 1, id="default"), pytest.param(True, 0, id="anchor")],
)
def test_dspark_speculators_keep_their_anchor(anchor: bool | None, extra: int) -> None:
    changes = {} if anchor is None else {"sample_from_anchor": anchor}
    hf = speculator("dspark", tokens=7, block_size=8, **BLOCK, **changes)
    config = engine({"model": "sp/x", "method": "dspark"}, source=with_models({"sp/x": hf}))
    assert config.draft_model is not None
    assert config.num_lookahead_tokens == config.num_speculative_tokens + extra
    assert config.draft_model.hf_config["dspark_bonus_anchor"] is (anchor is not True)


def test_dspark_speculators_need_their_mask() -> None:
    with pytest.raises(ConfigError, match="mask_token_id"):
        serve(speculator("dspark", aux_hidden_state_layer_ids=[2, 5], block_size=8))


def test_flags_on_a_speculator_are_refused() -> None:
    with pytest.raises(ConfigError, match="--spec-tokens and a speculators model"):
        engine(None, model="sp/eagle3", spec_tokens=3)


def test_a_speculator_as_draft() -> None:
    resolved = spec({"model": "sp/eagle3", "K": 3})
    draft = resolved.draft_model_config
    assert draft is not None and resolved.method == "eagle3"
    assert (draft.architecture, draft.model_type) == ("Eagle3LlamaForCausalLM", "speculators")


def test_the_callers_checkpoint_dict_is_not_changed() -> None:
    hf = copy.deepcopy(CATALOG["sp/dspark"])
    convert_if_speculators(hf, "x")
    assert hf == CATALOG["sp/dspark"]


def test_revision_names_the_speculator_not_its_target() -> None:
    seen: list[tuple[str, str | None]] = []

    def source(model: str, revision: str | None) -> Any:
        seen.append((model, revision))
        return CATALOG[model]

    config = engine(None, model="sp/eagle3", revision="r7", source=source)
    assert ("meta/verifier", None) in seen and ("sp/eagle3", "r7") in seen
    assert config.model.revision is None
    assert config.draft_model is not None and config.draft_model.revision == "r7"


def test_independent_speculator_is_a_draft_model() -> None:
    hf = {**head(num_hidden_layers=4), **{
        key: value for key, value in speculator("independent", tokens=4).items()
        if key.startswith("speculators")}}  # fmt: skip
    config = serve(hf)
    assert config.speculative is not None
    assert (config.speculative.method, config.num_speculative_tokens) == ("draft_model", 4)


@pytest.mark.parametrize(
    ("model", "method", "tokens"),
    [("sp/eagle3", "eagle3", 5), ("sp/peagle", "eagle3", 5), ("sp/dflash", "dflash", 5)],
)
def test_k_is_the_speculators_wherever_it_is_given(model: str, method: str, tokens: int) -> None:
    config = engine({"model": model}, model="meta/verifier")
    assert (config.speculative.method, config.num_speculative_tokens) == (method, tokens)
    (said,) = (d for d in config.decisions if d.field.endswith(".num_speculative_tokens"))
    assert (said.source, said.reason) == ("checkpoint", "proposal_methods[0].speculative_tokens")
    assert engine({"model": model, "K": 2}, model="meta/verifier").num_speculative_tokens == 2


@pytest.mark.parametrize("tokens", [None, 0, True, "5"])
def test_k_that_a_speculator_does_not_say_must_be_given(tokens: object) -> None:
    source = with_models({"sp/none": speculator("eagle3", tokens=tokens)})
    with pytest.raises(ConfigError, match="num_speculative_tokens must be provided"):
        engine({"model": "sp/none"}, model="meta/verifier", source=source)


def test_mtp_and_eagle_speculators() -> None:
    mtp = speculator("mtp", tokens=1, num_nextn_predict_layers=1)
    mtp["transformer_layer_config"]["model_type"] = "qwen3"
    assert serve(mtp).speculative.method == "mtp"
    assert serve(speculator("eagle")).speculative.method == "eagle"
