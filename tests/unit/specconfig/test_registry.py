"""Kernel options of the draft, and methods of others: registered or declared."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from specconfig import registry
from specconfig.errors import ConfigError
from specconfig.method_names import BUILTIN_METHODS
from specconfig.options import SpeculativeFields, SpeculativeOptions
from specconfig.speculators.base import SpeculatorConfig
from specconfig.speculators.eagle import Eagle3SpeculatorConfig, EagleSpeculatorConfig
from specconfig.speculators.ngram import NgramSpeculatorConfig
from tests.unit.specconfig.catalog import engine, head, spec, with_models

EAGLE3 = {"method": "eagle3", "model": "org/EAGLE3-head", "K": 3}


@pytest.mark.parametrize(
    ("text", "expected"),
    [pytest.param("auto", None, id="auto"), pytest.param("AuTo", None, id="AuTo"),
     pytest.param("flash_attn", "FLASH_ATTN", id="flash")],
)  # fmt: skip
def test_attention_backends_in_any_case(text: str, expected: str | None) -> None:
    assert spec({**EAGLE3, "attention_backend": text}).attention_backend == expected


def test_unknown_attention_backends_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"Unknown attention backend 'nope'.*FLASH_ATTN"):
        spec({**EAGLE3, "attention_backend": "nope"})


def test_open_and_closed_sets_of_kernels() -> None:
    resolved = spec({**EAGLE3, "quantization": "weird", "kv_cache_dtype": "weird"})
    assert (resolved.quantization, resolved.kv_cache_dtype) == ("weird", "weird")
    with pytest.raises(ConfigError, match="moe_backend"):
        spec({**EAGLE3, "moe_backend": "nope"})


@pytest.mark.parametrize(
    ("given", "model"),
    [pytest.param({"method": "ngram", "K": 4, "parallel_drafting": True}, "meta/target",
                     id="ngram"),
     pytest.param({"method": "mtp", "K": 3, "parallel_drafting": True}, "ds/V3", id="mtp")],
)  # fmt: skip
def test_parallel_drafting_stays_with_its_methods(given: dict[str, Any], model: str) -> None:
    with pytest.raises(ConfigError, match="parallel_drafting does not apply"):
        spec(given, model=model)


def test_a_step_without_room_to_draft_is_refused() -> None:
    with pytest.raises(ConfigError, match="not enough slots"):
        engine({"model": "meta/tiny", "K": 3}, max_num_batched_tokens=3)


# S: registry ---------------------------------------------------------------------------------


class CustomEagle(EagleSpeculatorConfig):
    """An EAGLE variant of a third party."""

    variant = "custom-eagle"
    implementation = "thirdparty.drafters:Mine"
    supported_options = frozenset({"speculator_options"})


class OtherEagle(EagleSpeculatorConfig):
    """Another one."""


class DeclaredEagle3(Eagle3SpeculatorConfig):
    """A class that a checkpoint declares."""

    variant = "declared"


class Standalone(SpeculatorConfig):
    """A method with no built-in relative."""

    variant = "standalone"
    implementation = "thirdparty.drafters:Other"


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    before = dict(registry._custom)
    registry._custom.clear()  # of other tests in this process
    yield
    registry._custom.clear()
    registry._custom.update(before)


@pytest.mark.parametrize(
    "name", [pytest.param("ngram", id="ngram"), pytest.param("deepseek_mtp", id="alias"),
             pytest.param("pard", id="pard")]
)  # fmt: skip
def test_built_in_names_cannot_be_registered(name: str) -> None:
    with pytest.raises(ConfigError, match="built-in speculative method"):
        registry.register_speculative_method(name, CustomEagle)


def test_registering_twice_is_fine_taking_a_name_is_not() -> None:
    registry.register_speculative_method("x", CustomEagle)
    registry.register_speculative_method("x", CustomEagle)
    assert registry.registered_speculative_methods() == ["x"]
    with pytest.raises(ConfigError, match="already registered"):
        registry.register_speculative_method("x", OtherEagle)


def test_a_custom_method_takes_its_bases_path() -> None:
    registry.register_speculative_method("x", CustomEagle)
    config = engine({"method": "x", "model": "org/eagle-head", "K": 3})
    assert config.speculative is not None
    assert (config.speculative.custom_method, config.speculative.method) == ("x", "eagle")
    assert config.drafter_implementation == "thirdparty.drafters:Mine"
    assert config.draft_law is not None and config.draft_law.num_next_tokens == 1
    # The plan carries the class, so a process that never registered it reads it back.
    registry._custom.clear()
    assert type(config).from_json(config.to_json()) == config


def test_a_method_without_a_base_keeps_its_name() -> None:
    registry.register_speculative_method("alone", Standalone)
    config = engine({"method": "alone", "K": 3})
    assert config.speculative is not None
    assert config.speculative.method == config.speculative.custom_method == "alone"
    assert config.num_lookahead_tokens == 0


def test_unknown_methods_are_answered_with_registered_ones() -> None:
    registry.register_speculative_method("x", CustomEagle)
    with pytest.raises(ConfigError) as raised:
        spec({"method": "nope", "K": 3})
    text = str(raised.value)
    assert "'nope'" in text and "['x']" in text
    assert str(sorted(BUILTIN_METHODS)) in text


@pytest.mark.parametrize(
    ("given", "model"),
    [
        pytest.param({"method": "eagle", "model": "org/eagle-head", "K": 3,
                      "index_share_for_mtp_iteration": True}, "meta/target", id="eagle"),
        pytest.param({"method": "mtp", "K": 1, "dspark_draft_topk": 4}, "ds/V3", id="mtp"),
        pytest.param({"method": "ngram", "K": 3, "speculator_options": {}}, "meta/target",
                     id="ngram"),
    ],
)  # fmt: skip
def test_options_of_other_methods_are_refused(given: dict[str, Any], model: str) -> None:
    with pytest.raises(ConfigError, match="unsupported option for method"):
        spec(given, model=model)


def declaring(name: str) -> Any:
    return with_models({"org/declared-eagle3": head(speculator_config_class=name)})


def test_a_checkpoint_may_declare_a_known_subclass() -> None:
    given = {"method": "eagle3", "model": "org/declared-eagle3", "K": 3}
    resolved = spec(given, source=declaring(DeclaredEagle3.__qualname__))
    assert resolved.speculator.variant == "declared"


def test_a_checkpoint_cannot_declare_another_method() -> None:
    given = {"method": "eagle3", "model": "org/declared-eagle3", "K": 3}
    with pytest.raises(ConfigError, match=r"'eagle3'.*declares 'ngram'"):
        spec(given, source=declaring(NgramSpeculatorConfig.__qualname__))


def test_checkpoints_cannot_name_code_to_import() -> None:
    given = {"method": "eagle3", "model": "org/declared-eagle3", "K": 3}
    with pytest.raises(ConfigError, match="built-in or registered"):
        spec(given, source=declaring("os:system"))


def test_several_mtp_modules_have_a_class_of_their_own() -> None:
    speculator = spec({"method": "mtp", "K": 2}, model="ds/V3-2").speculator
    assert type(speculator).__name__ == "MultiModuleMTPSpeculatorConfig"
    assert speculator.num_prefill_lookahead_tokens == 2


IMPORTS = """
import sys, time
start = time.process_time()
import specconfig
specconfig.EngineArgs, specconfig.EngineConfig, specconfig.ConfigError
specconfig.SpeculativeConfig, specconfig.register_speculative_method
elapsed = time.process_time() - start
names = ("torch", "ray", "transformers", "numpy", "huggingface_hub")
heavy = [m for m in names if m in sys.modules]
from specconfig.method_names import CONFIG_BY_METHOD
methods = [m for m in sys.modules if any(c.startswith(m + ":") for c in CONFIG_BY_METHOD.values())]
engine = [m for m in sys.modules if m.split(".")[0] in ("actors", "parallel", "deploy")]
print(repr((heavy, methods, engine, elapsed)))
"""


def test_imports_stay_light() -> None:
    # CPU time, best of three: the machine is shared, the budget is about this package.
    best = 9.0
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True
        )
        heavy, methods, engine_modules, elapsed = ast.literal_eval(done.stdout)
        assert (heavy, methods, engine_modules) == ([], [], [])
        best = min(best, elapsed)
    assert best < 0.5


SEED = {
    "method": "eagle3",
    "model": "org/EAGLE3-head",
    "num_speculative_tokens": 4,
    "num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 32, 3], [33, 128, 2]],
    "draft_lm_head_quantization": "fp8",
    "draft_tensor_parallel_size": 1,
    "disable_eagle_block_drop": False,
}


def test_a_whole_eagle3_example() -> None:
    config = engine(SEED, max_num_seqs=200)
    law = config.draft_law
    assert law is not None and (law.num_lookahead_tokens, law.num_next_tokens) == (4, 1)
    assert (config.num_hash_lookahead_tokens, config.max_num_new_slots_for_drafting) == (1, 0)
    assert {config.num_speculative_tokens_for_batch(n) for n in range(1, 9)} == {4}
    assert {config.num_speculative_tokens_for_batch(n) for n in range(9, 33)} == {3}
    assert {config.num_speculative_tokens_for_batch(n) for n in range(33, 201)} == {2}


def test_every_option_is_described() -> None:
    for cls in (SpeculativeFields, SpeculativeOptions):
        assert all(field.description for field in cls.model_fields.values())


def test_no_method_specific_option_is_unclaimed() -> None:
    from specconfig.method_names import CONFIG_BY_METHOD
    from specconfig.registry import load_class
    from specconfig.speculators.base import METHOD_OPTIONS

    claimed: set[str] = set()
    pending = [load_class(name) for name in CONFIG_BY_METHOD.values()]
    while pending:
        cls = pending.pop()
        claimed |= cls.supported_options
        pending.extend(cls.__subclasses__())
    assert claimed == set(METHOD_OPTIONS)
