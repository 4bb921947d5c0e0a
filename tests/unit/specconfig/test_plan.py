"""EngineArgs fields, facts from files, and what EngineConfig forwards."""

from __future__ import annotations

import ast
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import specconfig
from specconfig.app_args import AppArgs
from specconfig.engine import EngineConfig
from specconfig.engine_args import EngineArgs
from specconfig.engine_fields import parse_bytes
from specconfig.errors import ConfigError, MethodMismatchError
from specconfig.facts.model_facts import CLASS_DEFAULTS
from specconfig.facts.source import default_facts
from specconfig.method_names import BUILTIN_METHODS
from tests.unit.specconfig.catalog import TARGET, engine, facts, llama, tiny, with_models

ROOT = Path(__file__).parents[3]


def test_plain_decoding_forwards_nothing() -> None:
    config = engine(None)
    zero = ("num_speculative_tokens", "num_lookahead_tokens", "num_hash_lookahead_tokens",
            "max_num_new_slots_for_drafting", "draft_kv_bytes_per_token")  # fmt: skip
    assert [getattr(config, name) for name in zero] == [0] * len(zero)
    none = ("drafter_host", "drafter_implementation", "draft_placement", "draft_model",
            "draft_parallel", "max_num_draft_seqs", "aux_hidden_state_layer_ids",
            "draft_max_model_len")  # fmt: skip
    assert [getattr(config, name) for name in none] == [None] * len(none)
    assert config.is_lossless and config.draft_law is None and not config.use_block_drop
    assert (config.max_model_len, config.max_num_active_seqs) == (8192, 32)


def test_model_facts() -> None:
    model = engine(None).model
    assert (model.vocab_size, model.hidden_size, model.head_dim) == (32000, 4096, 128)
    assert (model.eos_token_ids, model.bos_token_id) == ((2,), 1)
    assert (model.dtype, model.checkpoint_dtype) == ("auto", "bfloat16")
    assert model.derived_max_model_len == 8192


def test_frozen_and_strict() -> None:
    config = engine(None)
    with pytest.raises(ValidationError):
        config.model.__class__.model_validate({**config.model.model_dump(), "extra": 1})
    with pytest.raises(ValidationError):
        config.scheduler.max_num_seqs = 1  # type: ignore[misc]


def every_model() -> list[type[BaseModel]]:
    from specconfig import decisions, draft_law, model, options, speculative
    from specconfig.explaining import explanation
    from specconfig.resolving import kv_memory

    modules = (decisions, draft_law, explanation, kv_memory, model, options, speculative)
    found: set[type[BaseModel]] = {EngineArgs, AppArgs}
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, BaseModel) and value is not BaseModel:
                found.add(value)
    return sorted(found, key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", every_model(), ids=lambda cls: cls.__name__)
def test_every_model_is_frozen_and_closed(cls: type[BaseModel]) -> None:
    assert cls.model_config["frozen"] is True and cls.model_config["extra"] == "forbid"


@pytest.mark.parametrize("cls", [EngineArgs, AppArgs])
def test_every_argument_is_described(cls: type[BaseModel]) -> None:
    assert [name for name, info in cls.model_fields.items() if not info.description] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, None), (7, 7), ("512MiB", 512 * 2**20), ("2GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29),
     ("64k", 65536)],
)  # fmt: skip
def test_bytes(text: Any, expected: int | None) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_cache_memory_bytes": "lots"}, "kv_cache_memory_bytes"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"target_gpu_fraction": 0.8, "draft_gpu_fraction": 0.3}, "draft_gpu_fraction"),
        ({"dtype": "float8"}, "dtype"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    ],
)
def test_refused_arguments(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineArgs(model=TARGET, **changes)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("changes", "gist"),
    [
        ({"max_model_len": 9000}, "at most 8192"),
        ({"tensor_parallel_size": 3}, "32 attention heads"),
        ({"enable_expert_parallel": True}, "no experts"),
        ({"enable_chunked_prefill": False}, "without chunked prefill"),
    ],
)
def test_refused_plans(changes: dict[str, Any], gist: str) -> None:
    with pytest.raises(ConfigError, match=gist):
        engine(None, **changes)


def test_pydantic_callers_see_the_same_text() -> None:
    # Serve validates builder args with model_validate; the nearest name must survive that.
    with pytest.raises(ValueError, match="did you mean 'max_num_seqs'"):
        AppArgs.model_validate({"model": TARGET, "max_num_sqs": 1})


def test_overrides_merge_and_are_recorded() -> None:
    config = engine(None, hf_overrides={"rope_scaling": {"factor": 4.0}})
    assert config.model.hf_config["rope_scaling"] == {"rope_type": "llama3", "factor": 4.0}
    assert config.model.hf_overrides == {"rope_scaling": {"factor": 4.0}}


def test_a_function_becomes_the_nested_difference_it_made() -> None:
    def stretch(hf: dict[str, Any]) -> dict[str, Any]:
        hf["rope_scaling"]["factor"] = 4.0
        return {**hf, "num_hidden_layers": 1, "new": {"a": 1}}

    config = engine({"model": "meta/tiny", "K": 3}, hf_overrides=stretch)
    overrides = {"rope_scaling": {"factor": 4.0}, "num_hidden_layers": 1, "new": {"a": 1}}
    for model in (config.model, config.draft_model):
        assert model is not None
        assert model.hf_overrides == overrides and model.num_hidden_layers == 1
        assert model.hf_config["rope_scaling"] == {"rope_type": "llama3", "factor": 4.0}
    assert "rope_scaling" in llama() and llama()["rope_scaling"]["factor"] == 8.0


@pytest.mark.parametrize(
    ("change", "gist"),
    [
        (lambda hf: {**hf, "rope_scaling": {"factor": 1.0}}, r"removes \['rope_scaling.rope_type'"),
        (lambda hf: {**hf, "new": {1, 2}}, "JSON values"),
    ],
)
def test_a_function_that_cannot_travel_is_refused(change: Any, gist: str) -> None:
    with pytest.raises(ConfigError, match=gist):
        engine(None, hf_overrides=change)


def test_seed_is_carried_to_the_engine() -> None:
    assert (engine(None).runtime.seed, engine(None, seed=7).runtime.seed) == (None, 7)


def test_digest_ignores_explanations_only() -> None:
    config = engine({"method": "ngram", "K": 3})
    assert config.model_copy(update={"decisions": ()}).compute_hash() == config.compute_hash()
    assert engine({"method": "ngram", "K": 4}).compute_hash() != config.compute_hash()
    assert engine({"method": "ngram", "K": 3}, seed=1).compute_hash() != config.compute_hash()


def test_kv_bytes() -> None:
    mla = llama(kv_lora_rank=512, qk_rope_head_dim=64)
    hybrid = llama(layer_types=["linear_attention", "full_attention"] * 16)
    source = with_models({"t/mla": mla, "t/hybrid": hybrid})
    assert engine(None).target_kv_bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert engine(None, model="t/mla", source=source).target_kv_bytes_per_token == 32 * 576 * 2
    assert engine(None, model="t/hybrid", source=source).target_kv_bytes_per_token == (
        16 * 2 * 8 * 128 * 2
    )


def test_placement() -> None:
    draft = {"model": "meta/tiny", "K": 3}
    assert engine(draft, placement="fused").draft_placement == "fused"
    config = engine({"model": "org/EAGLE3-head", "K": 3}, placement="dedicated")
    assert config.draft_placement is None
    assert "has no effect" in "\n".join(config.warnings)


def test_app_args() -> None:
    args = AppArgs(model=TARGET, num_replicas=2, max_num_seqs=8, max_num_queued_requests=4)
    assert args.resolved_max_ongoing_requests == 12
    assert args.ingress_max_ongoing_requests == 24
    assert args.resolve(facts).scheduler.max_num_seqs == 8


# Facts from files ------------------------------------------------------------------------------


def save(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, llama(), {"eos_token_id": [2, 7]})
    monkeypatch.setenv("MODELS", str(tmp_path.parent))
    config = EngineArgs(model=f"$MODELS/{tmp_path.name}").resolve()
    assert config.model.model == str(tmp_path)
    assert config.model.eos_token_ids == (2, 7)
    assert "__generation_config__" not in config.model.hf_config


def test_draft_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        save(tmp_path / name, llama() if name == "target" else tiny())
    monkeypatch.setenv("HOME", str(tmp_path))
    config = EngineArgs(model="~/target", spec_model="~/draft", spec_tokens=2).resolve()
    assert config.draft_model is not None
    assert config.draft_model.model == str(tmp_path / "draft")


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "~/nowhere-at-all"])
def test_missing_paths(model: str) -> None:
    with pytest.raises(ConfigError, match="an existing path"):
        EngineArgs(model=model).resolve()


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        default_facts(str(tmp_path), None)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds an object"):
        default_facts(str(tmp_path), None)
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    with pytest.raises(ConfigError, match="directory"):
        default_facts(str(file), None)


def test_incomplete_configs_name_the_key() -> None:
    for key in ("vocab_size", "hidden_size", "num_attention_heads"):
        hf = llama(model_type="unheard_of")
        source = with_models({"t/x": {k: v for k, v in hf.items() if k != key}})
        with pytest.raises(ConfigError, match=key):
            engine(None, model="t/x", source=source)


def test_class_defaults_fill_what_configs_leave_out() -> None:
    # Gemma 3 checkpoints write their language part as a difference to the class.
    hf = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
          "text_config": {"model_type": "gemma3_text", "hidden_size": 2560,
                          "num_hidden_layers": 34}}  # fmt: skip
    model = engine(None, model="g/3", source=with_models({"g/3": hf})).model
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (8, 4, 256)
    assert (model.hidden_size, model.vocab_size, model.max_model_len) == (2560, 262208, 131072)


def test_class_defaults_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for model_type, defaults in CLASS_DEFAULTS.items():
        config = transformers.AutoConfig.for_model(model_type)
        assert {key: getattr(config, key) for key in defaults} == defaults, model_type


def test_missing_draft_names_the_draft_field() -> None:
    with pytest.raises(ConfigError) as raised:
        engine({"model": "who/knows", "K": 3})
    assert raised.value.field == "speculative_config.model"


def test_infinity_in_a_checkpoint_config_survives() -> None:
    source = with_models({"t/inf": llama(time_step_limit=[0.0, float("inf")])})
    config = engine(None, model="t/inf", source=source)
    assert EngineConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("arch", "expected"), [("llama", "LlamaForCausalLM"), ("qwen3", "Qwen3ForCausalLM")]
)
def test_gguf_header(tmp_path: Path, arch: str, expected: str) -> None:
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(3)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_token_list([f"token {n}" for n in range(100)])
    writer.add_token_scores([0.0] * 100)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_tensor("x", numpy.zeros(4, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = EngineArgs(model=str(path), spec_method="ngram", spec_tokens=2).resolve().model
    assert (model.architecture, model.vocab_size, model.max_model_len) == (expected, 100, 512)
    assert (model.num_hidden_layers, model.num_key_value_heads, model.head_dim) == (3, 2, 16)
    assert (model.eos_token_ids, model.quantization) == ((2,), "gguf")


def test_gguf_with_numbers_by_layer_is_refused(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_head_count_kv([2, 4])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"head_count_kv.*an array of 2"):
        EngineArgs(model=str(path)).resolve()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "a readable GGUF file"),
        (b"not a gguf file at all, but long enough to have a header", "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 500) + b"general", "in the middle of a string"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"x", 77), "value type 77 is unknown"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 5), "a readable GGUF file"),
    ],
)
def test_gguf_errors(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        EngineArgs(model=str(path)).resolve()


# Package rules -----------------------------------------------------------------------------------


def test_errors_cross_processes() -> None:
    error = MethodMismatchError("a.b", 3, "1 or 2", "use 1", message="what")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is MethodMismatchError
    assert (str(again), again.field, again.value, again.fix) == (str(error), "a.b", 3, "use 1")


def test_public_names() -> None:
    for name in specconfig.__all__:
        assert getattr(specconfig, name) is not None
    with pytest.raises(AttributeError):
        _ = specconfig.nothing_like_this


def _compares_a_method(node: ast.AST) -> bool:
    def is_method(side: ast.AST) -> bool:
        name = getattr(side, "attr", getattr(side, "id", None))
        return name in ("method", "spec_method", "speculative_method")

    def names(side: ast.AST) -> bool:
        return any(
            isinstance(part, ast.Constant) and part.value in BUILTIN_METHODS
            for part in ast.walk(side)
        )

    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(map(is_method, sides)) and any(map(names, sides))
    if isinstance(node, ast.Match):
        return is_method(node.subject) and any(names(case.pattern) for case in node.cases)
    return False


@pytest.mark.parametrize("package", ["actors", "parallel", "deploy"])
def test_no_consumer_compares_method_names(package: str) -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / package).rglob("*.py"))
        # The drafter registry is the one place that may know names.
        if path.name != "registry.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if _compares_a_method(node)
    ]
    assert offenders == [], "read a capability of EngineConfig instead"


def test_the_check_above_sees_comparisons() -> None:
    bad = ("spec.method == 'eagle'", "method in ('ngram', 'suffix')", "'mtp' == c.method")
    assert all(_compares_a_method(ast.parse(text).body[0].value) for text in bad)  # type: ignore
    assert not _compares_a_method(ast.parse("x.method == 'GET'").body[0].value)  # type: ignore
