"""Faults that users of other engines reported: settings, checkpoints, vocabularies, tables of K.

What needs weights or a running engine is tested with the engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specconfig.engine import EngineConfig
from specconfig.engine_args import EngineArgs
from specconfig.errors import ConfigError
from specconfig.explaining.explain import explain_file
from specconfig.options import SpeculativeOptions
from tests.unit.specconfig.catalog import (
    TARGET,
    engine,
    facts,
    head,
    llama,
    spec,
    tiny,
    with_models,
)

NGRAM = {"method": "ngram", "K": 3}


def message(given: dict[str, Any], **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        engine(given, **kwargs)
    return str(raised.value)


def test_too_many_tokens_for_the_checkpoint() -> None:
    text = message({"model": "org/n3-eagle3", "K": 4})
    assert "num_speculative_tokens=4" in text and "n_predict=3" in text


def test_budget_errors_name_the_settings() -> None:
    text = message({"method": "pard", "model": "meta/tiny-pard", "K": 16},
                   max_num_seqs=256, max_num_batched_tokens=2048)  # fmt: skip
    for part in ("num_speculative_tokens=16", "max_num_seqs=256", "max_num_batched_tokens=2048"):
        assert part in text


def test_budget_warnings_name_the_settings_too() -> None:
    config = engine({"method": "ngram", "K": 16}, max_num_seqs=256, max_num_batched_tokens=2048)
    [warning] = config.warnings
    for part in ("num_speculative_tokens=16", "max_num_seqs=256", "max_num_batched_tokens=2048"):
        assert part in warning


def test_typos_get_a_proposal() -> None:
    assert "'num_speculative_tokens'" in message({"method": "ngram", "num_speculative_token": 3})
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        EngineArgs(model=TARGET, max_num_sequences=3)


def test_hyphens_and_underscores() -> None:
    data = {"model": TARGET, "speculative-config": {"method": "ngram", "num-speculative-tokens": 3}}
    assert EngineArgs.from_mapping(data).resolve(facts).num_speculative_tokens == 3


def test_two_spellings_of_one_key() -> None:
    with pytest.raises(ConfigError, match="one spelling per key"):
        EngineArgs.from_mapping({"model": TARGET, "max-num-seqs": 1, "max_num_seqs": 2})


def test_unknown_methods_fail_at_parse_time() -> None:
    text = message({"method": "wat", "K": 1})
    assert "Unknown speculative method 'wat'" in text and "'dspark'" in text


def test_parallel_drafting_is_never_ignored() -> None:
    text = message({"method": "eagle", "model": "org/eagle-head", "K": 3,
                    "parallel_drafting": True})  # fmt: skip
    assert "parallel_drafting does not apply" in text


@pytest.mark.parametrize(
    ("text", "gist"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 3', "received"),
        ('"{\\"method\\": \\"ngram\\"}"', "escaped twice"),
        ("[1]", "not an object"),
    ],
)
def test_the_received_string_is_shown(text: str, gist: str) -> None:
    with pytest.raises(ConfigError, match=gist) as raised:
        EngineArgs.from_mapping({"model": TARGET, "speculative_config": text})
    assert repr(text) in str(raised.value)


def test_inline_and_file(tmp_path: Path) -> None:
    body = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    file = tmp_path / "spec.json"
    file.write_text(body)
    for text in (body, f"@{file}"):
        args = EngineArgs.from_mapping({"model": TARGET, "speculative_config": text})
        assert args.resolve(facts).num_speculative_tokens == 3


def test_draft_degree_lists_what_is_allowed() -> None:
    given = {"model": "meta/tiny", "K": 3, "draft_tensor_parallel_size": 2}
    assert "1 or 4" in message(given, tensor_parallel_size=4)


def test_nested_text_config() -> None:
    inner = llama()
    outer = {"architectures": ["SomeVLForConditionalGeneration"], "model_type": "some_vl",
             "text_config": {k: v for k, v in inner.items() if k != "architectures"}}  # fmt: skip
    ids = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}}
    config = engine(
        {"method": "extract_hidden_states", "K": 1, "draft_model_config": ids},
        model="some/vl", source=with_models({"some/vl": outer}),
    )  # fmt: skip
    assert (config.model.vocab_size, config.model.num_hidden_layers) == (32000, 32)
    assert config.aux_hidden_state_layer_ids == (2, 16, 29)


@pytest.mark.parametrize(
    "field", [name for name, info in SpeculativeOptions.model_fields.items()
              if info.default is None and name not in ("method", "num_speculative_tokens")]
)  # fmt: skip
def test_null_means_absent(field: str) -> None:
    assert spec({**NGRAM, field: None}) == spec(NGRAM)


def test_defaults_are_a_snapshot() -> None:
    defaults = {name: info.default for name, info in EngineArgs.model_fields.items()
                if name != "model" and info.default is not None}  # fmt: skip
    assert defaults == {
        "dtype": "auto", "device": "auto", "tensor_parallel_size": 1, "data_parallel_size": 1,
        "pipeline_parallel_size": 1, "enable_expert_parallel": False, "max_num_seqs": 32,
        "max_num_batched_tokens": 512, "block_size": 16, "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": True, "enable_chunked_prefill": True,
        "trust_remote_code": False, "max_num_queued_requests": 256, "max_logprobs": 20,
        "placement": "auto", "strict_pack": False, "batch_invariant": True,
        "compile_layers": "auto",
        "target_gpu_fraction": 0.7, "draft_gpu_fraction": 0.3, "dynamic_k_dp_policy": "disable",
    }  # fmt: skip
    spec_defaults = {name: info.default for name, info in SpeculativeOptions.model_fields.items()
                     if info.default not in (None, False)}  # fmt: skip
    assert spec_defaults == {
        "draft_sample_method": "greedy", "rejection_sample_method": "standard",
        "suffix_decoding_max_tree_depth": 24, "suffix_decoding_max_cached_requests": 10000,
        "suffix_decoding_max_spec_factor": 1.0, "suffix_decoding_min_token_prob": 0.1,
        "fly_entropy_threshold": 0.3, "fly_entropy_top_k": 3,
    }  # fmt: skip


def test_one_plan_for_every_run_mode(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    args = {"model": TARGET, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    app = {"name": "a", "import_path": "deploy.app:build", "args": args}
    path.write_text(json.dumps({"applications": [app]}))
    served = explain_file(path, facts).apps[0].config
    assert served.compute_hash() == EngineArgs.from_mapping(args).resolve(facts).compute_hash()


def test_rope_in_either_place_and_optional_keys() -> None:
    bare = {
        key: value
        for key, value in head().items()
        if key not in ("rope_scaling", "bos_token_id", "eos_token_id", "torch_dtype")
    }
    variants = [
        {**bare, "rope_theta": 1e4},
        {**bare, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {**bare, "rope_scaling": None},
        {**bare, "eagle_aux_hidden_state_layer_ids": None, "draft_vocab_size": None},
        {key: value for key, value in bare.items() if key != "vocab_size"},
        {**bare, "dtype": "bfloat16"},
    ]  # fmt: skip
    for hf in variants:
        config = engine({"model": "org/v-eagle3", "K": 3}, source=with_models({"org/v-eagle3": hf}))
        assert config.draft_model is not None and config.draft_model.vocab_size == 32000
        assert config.aux_hidden_state_layer_ids == (2, 16, 29)


def test_quantisation_is_the_drafts_own() -> None:
    source = with_models({"t/q": llama(quantization_config={"quant_method": "fp8"})})
    config = engine({"model": "meta/tiny", "K": 3}, model="t/q", source=source)
    assert config.model.quantization == "fp8"
    assert config.draft_model is not None and config.draft_model.quantization is None


def test_another_width_is_fine_for_a_draft_model() -> None:
    config = engine({"model": "meta/tiny", "K": 3})
    assert config.draft_model is not None
    assert config.draft_model.hidden_size != config.model.hidden_size


def test_a_head_of_another_width_is_not() -> None:
    hf = head(hidden_size=2048, num_attention_heads=16)
    source = with_models({"org/narrow-eagle3": hf})
    assert "width 2048" in message({"model": "org/narrow-eagle3", "K": 3}, source=source)
    trained_for_it = with_models({"org/narrow-eagle3": {**hf, "target_hidden_size": 4096}})
    engine({"model": "org/narrow-eagle3", "K": 3}, source=trained_for_it)


@pytest.mark.parametrize(
    ("ids", "gist"),
    [([2, 2, 5], "increasing"), ([5, 2], "increasing"), ([2, 33], "32 layers"), ([-1, 2], "32")],
)
def test_tapped_layers_are_checked(ids: list[int], gist: str) -> None:
    source = with_models({"org/x-eagle3": head(eagle_aux_hidden_state_layer_ids=ids)})
    assert gist in message({"model": "org/x-eagle3", "K": 3}, source=source)


def test_the_last_residual_stream_can_be_tapped() -> None:
    source = with_models({"org/x-eagle3": head(eagle_aux_hidden_state_layer_ids=[0, 32])})
    config = engine({"model": "org/x-eagle3", "K": 3}, source=source)
    assert config.aux_hidden_state_layer_ids == (0, 32)


def test_mask_id_is_an_embedding_row() -> None:
    source = with_models({"meta/bad-pard": tiny(pard_token=32000)})
    given = {"method": "pard", "model": "meta/bad-pard", "K": 3}
    assert "below the draft's vocab_size 32000" in message(given, source=source)


class TokenizerFacts:
    """A facts source that also knows tokenizers, as the default one does for directories."""

    def __init__(self, models: dict[str, Any], vocabs: dict[str, dict[str, int]]) -> None:
        self._source = with_models(models)
        self._vocabs = vocabs

    def __call__(self, model: str, revision: str | None) -> Any:
        return self._source(model, revision)

    def tokenizer_vocab(self, model: str, revision: str | None) -> dict[str, int] | None:
        return self._vocabs.get(model)


def test_sizes_differ() -> None:
    source = with_models({"t/100": llama(vocab_size=100), "d/90": tiny(vocab_size=90)})
    text = message({"model": "d/90", "K": 3}, model="t/100", source=source)
    assert "100" in text and "90" in text and "use_heterogeneous_vocab" in text


def test_padding_rows_are_no_difference() -> None:
    vocab = {f"t{i}": i for i in range(100)}
    models = {"t/104": llama(vocab_size=104), "d/112": tiny(vocab_size=112)}
    source = TokenizerFacts(models, {"t/104": vocab, "d/112": dict(vocab)})
    config = engine({"model": "d/112", "K": 3}, model="t/104", source=source)
    assert config.speculative is not None and config.speculative.shared_vocab_size == 100


def test_other_tokens_of_the_same_number_are() -> None:
    models = {"t/104": llama(vocab_size=104), "d/112": tiny(vocab_size=112)}
    source = TokenizerFacts(models, {"t/104": {"a": 0}, "d/112": {"b": 0}})
    assert "differ" in message({"model": "d/112", "K": 3}, model="t/104", source=source)


def test_equal_size_is_no_proof() -> None:
    """Of a draft of another family, and of one that has another name for an added token."""
    vocab = {f"t{i}": i for i in range(300)}
    models = {"t/300": llama(vocab_size=300), "d/300": tiny(vocab_size=300)}

    def resolve(draft: dict[str, int] | None) -> EngineConfig:
        source = TokenizerFacts(models, {"t/300": vocab} | ({"d/300": draft} if draft else {}))
        return engine({"model": "d/300", "K": 3}, model="t/300", source=source)

    def reasons(config: EngineConfig) -> str:
        return "".join(d.reason for d in config.decisions if "shared_vocab_size" in d.field)

    same = resolve(dict(vocab))
    assert reasons(same) == "equal tokenizers" and not same.warnings
    assert "cannot be read here" in reasons(resolve(None))
    near = {token: index for token, index in vocab.items() if index < 298} | {
        "<a>": 298,
        "<b>": 299,
    }
    (warning,) = resolve(near).warnings
    assert "2 of 300 token ids mean something else to draft 'd/300'" in warning
    assert "298 is 't298' and '<a>', 299 is" in warning
    with pytest.raises(ConfigError, match="300 of 300 token ids") as raised:
        resolve({f"u{i}": i for i in range(300)})
    assert raised.value.field == "speculative_config.model" and "same tokenizer" in raised.value.fix


def test_a_gguf_vocabulary_is_compared_too(tmp_path: Path) -> None:
    from tests.unit.specconfig.test_end_tokens import write_gguf

    target = write_gguf(tmp_path / "t.gguf")
    draft = tmp_path / "draft"
    draft.mkdir()
    hf = tiny(vocab_size=100, max_position_embeddings=512)
    (draft / "config.json").write_text(json.dumps(hf))
    (draft / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {f"word {n}": n for n in range(100)}}})
    )
    with pytest.raises(ConfigError, match="100 of 100 token ids"):
        EngineArgs(model=str(target), spec_model=str(draft), spec_tokens=2).resolve()


def test_local_tokenizers_are_compared(tmp_path: Path) -> None:
    def save(name: str, hf: dict[str, Any]) -> str:
        place = tmp_path / name
        place.mkdir()
        (place / "config.json").write_text(json.dumps(hf))
        tokenizer = {"model": {"vocab": {"a": 0, "b": 1}},
                     "added_tokens": [{"id": 2, "content": "<s>"}]}  # fmt: skip
        (place / "tokenizer.json").write_text(json.dumps(tokenizer))
        return str(place)

    target, draft = save("t", llama(vocab_size=8)), save("d", tiny(vocab_size=16))
    config = EngineArgs(model=target, spec_model=draft, spec_tokens=2).resolve()
    assert config.speculative is not None and config.speculative.shared_vocab_size == 3


def test_heads_must_match_the_target() -> None:
    source = with_models({"org/v-eagle3": head(vocab_size=32064)})
    assert "32064" in message({"model": "org/v-eagle3", "K": 3}, source=source)


def test_revisions_reach_both_loaders() -> None:
    seen: list[tuple[str, str | None]] = []

    def source(model: str, revision: str | None) -> Any:
        seen.append((model, revision))
        return facts(model)

    config = engine({"model": "meta/tiny", "K": 3, "revision": "d1"}, revision="t1",
                    tokenizer_revision="k1", source=source)  # fmt: skip
    assert seen == [(TARGET, "t1"), ("meta/tiny", "d1")]
    assert config.model.tokenizer_revision == "k1"
    assert config.draft_model is not None and config.draft_model.tokenizer_revision == "k1"


def test_lookup_past_the_table() -> None:
    table = {"1-16": 3, "64-128": 2, "256-4096": 0}
    config = engine({**NGRAM, "num_speculative_tokens_per_batch_size": table})
    got = [config.num_speculative_tokens_for_batch(n) for n in (16, 17, 64, 200, 256, 5000)]
    assert got == [3, 3, 2, 2, 0, 0]


def test_errors_name_the_range() -> None:
    overlap = message({**NGRAM, "num_speculative_tokens_per_batch_size": {"1-4": 3, "4-8": 1}})
    assert "4-8" in overlap
    reverse = message({**NGRAM, "num_speculative_tokens_per_batch_size": {"9-1": 3}})
    assert "9-1 is reversed" in reverse


def test_drafting_stops_at_its_own_limit() -> None:
    assert engine({"model": "meta/tiny", "K": 3, "max_model_len": 32}).draft_max_model_len == 32
