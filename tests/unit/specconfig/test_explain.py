"""``paceline explain``: text, JSON, errors with lines, the seed's example, the shipped configs."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specconfig.explaining.explain import explain_file, main
from specconfig.explaining.explanation import Explanation
from specconfig.explaining.text import render
from tests.unit.specconfig.catalog import CATALOG, dflash, dspark, facts, head, llama, speculator

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "explain"
CONFIGS = sorted(
    path for path in (ROOT / "deploy" / "configs").glob("*.yaml") if path.name != "demo.yaml"
)


def qwen(**changes: Any) -> dict[str, Any]:
    return llama(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=151936,
                 num_hidden_layers=36, max_position_embeddings=40960,
                 rope_scaling=None, **changes)  # fmt: skip


SMOL = llama(vocab_size=49152, hidden_size=576, num_attention_heads=9, num_key_value_heads=3,
             num_hidden_layers=30, rope_scaling=None)  # fmt: skip
L3 = {"vocab_size": 128256}
GPT_OSS = llama(vocab_size=201088, hidden_size=2880, num_attention_heads=64, head_dim=64,
                num_hidden_layers=24, num_local_experts=32, model_type="gpt_oss")  # fmt: skip

# What the hub has, as far as resolution reads it; the files themselves are never fetched here.
HUB: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": SMOL,
    "Qwen/Qwen3-8B": qwen(),
    "Qwen/Qwen3-30B-A3B": qwen(num_experts=128),
    "Qwen/Qwen3-0.6B": {**qwen(), "hidden_size": 1024, "num_hidden_layers": 28},
    "amd/PARD-Qwen3-0.6B": {**qwen(), "hidden_size": 1024, "pard_token": 151665},
    "meta-llama/Meta-Llama-3-8B-Instruct": llama(**L3),
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": head(**L3),
    "meta-llama/Llama-3.1-8B-Instruct": llama(**L3, max_position_embeddings=131072),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": head(
        **L3, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=32000),
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": speculator(
        "eagle3", tokens=5, target="meta-llama/Llama-3.1-8B-Instruct",
        transformer_layer_config=head(**L3)),
    "openai/gpt-oss-20b": GPT_OSS,
    "amazon/gpt-oss-20b-p-eagle": head(
        vocab_size=201088, hidden_size=2880, num_attention_heads=64, head_dim=64,
        num_hidden_layers=4, architectures=["LlamaForCausalLMEagle3"], ptd_token_id=201087),
    "XiaomiMiMo/MiMo-7B-RL": llama(
        architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1),
    "lmsys/vicuna-7b-v1.3": llama(),
    "FasterDecoding/medusa-vicuna-7b-v1.3": CATALOG["org/medusa-head"],
    "z-lab/Qwen3-8B-DFlash-b16": dflash(vocab_size=151936, block_size=16),
    "Dogacel/Qwen3-8B-DSpark": dspark(vocab_size=151936, draft_vocab_size=None),
}  # fmt: skip


def hub(model: str, revision: str | None) -> dict[str, Any]:
    return HUB[model]


def write(directory: Path, text: str) -> Path:
    path = directory / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_is_valid(path: Path) -> None:
    explanation = explain_file(path, hub)
    assert explanation.ok, render(explanation)
    [app] = explanation.apps
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# "), "explain what the file is for"
    assert ("# Planned: " in text) is (app.cannot_start is not None)
    assert explanation.can_start is (app.cannot_start is None)
    assert ("LOSSY" in render(explanation)) is not app.config.is_lossless


def test_every_method_has_a_config() -> None:
    from specconfig.method_names import CONFIG_BY_METHOD, PARALLEL_METHODS

    names = {path.stem for path in CONFIGS}
    # ngram_gpu is a second name of ngram.
    assert {*CONFIG_BY_METHOD, *PARALLEL_METHODS} - {"ngram_gpu"} <= names


def test_experts_over_replicas_are_explained() -> None:
    explanation = explain_file(ROOT / "deploy" / "configs" / "experts.yaml", hub)
    assert "2 rank(s), experts spread over the gang's 8, in lockstep" in render(explanation)


@pytest.mark.parametrize("name", ["eagle3", "dynamic_k_dp", "errors"])
def test_golden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    got = render(explain_file(f"{name}.yaml", facts))
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(got, encoding="utf-8")
    assert got == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_json_round_trip(path: Path) -> None:
    explanation = explain_file(path, hub)
    again = Explanation.from_json(explanation.to_json())
    assert again == explanation
    assert again.apps[0].config.compute_hash() == explanation.apps[0].config.compute_hash()


SERVE = """\
proxy_location: EveryNode
applications:
- name: paceline
  import_path: deploy.app:build
  args:
    model: meta/target
    speculative_config:
      method: ngram
      num_speculative_tokens: 4
{extra}"""

BAD = [
    ("max_ongoing: 5\n", "", 1, "max_ongoing", "max_ongoing"),
    ("", "  deployments:\n  - {name: Engine, max_ongoing: 5}\n", 11,
     "applications.0.deployments.0.max_ongoing", "'max_ongoing_requests'"),
    ("http_options: {hosts: 0.0.0.0}\n", "", 1, "http_options.hosts", "'host'"),
    ("", "  import_pat: x\n", 10, "applications.0.import_pat", "'import_path'"),
    ("", "      num_speculative_token: 4\n", 10, "speculative_config.num_speculative_token",
     "'num_speculative_tokens'"),
    ("", "      prompt_lookup_min: 9\n      prompt_lookup_max: 3\n", 10,
     "speculative_config.prompt_lookup_min", "3"),
    ("", "    max_num_batched_tokens: 4\n", 10, "max_num_batched_tokens", "at least 5"),
    ("", "    trust_remote_code: true\n", 10, "trust_remote_code", "transformers"),
    ("", "    max_num_seqs: many\n", 10, "max_num_seqs", ""),
    ("", "    model: twice\n", 10, "model", "remove one"),
    ("", "    tensor_parallel_size: 3\n", 10, "tensor_parallel_size", "[1, 2, 4, 8, 16, 32]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("top", "extra", "line", "field", "fix"), BAD, ids=[f"{row[3]}-{row[2]}" for row in BAD]
)
def test_error_names_file_line_field_and_fix(
    tmp_path: Path, top: str, extra: str, line: int, field: str, fix: str
) -> None:
    path = write(tmp_path, top + SERVE.format(extra=extra))
    explanation = explain_file(path, facts)
    [problem] = explanation.problems
    assert (problem.line, problem.field) == (line, field)
    assert fix in problem.fix
    assert f"{path}:{line}: " in render(explanation)


def test_all_unknown_keys_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path, "model: meta/target\nmodle: x\nspeculative_config: {metod: ngram, k: 1}\n"
    )
    assert [p.field for p in explain_file(path, facts).problems] == [
        "modle", "speculative_config.metod", "speculative_config.k",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line"), [("a: [1\nb: 2\n", 2), ("- a\n", 1), ("just words\n", 1), ("", 1)]
)
def test_not_a_config(tmp_path: Path, text: str, line: int) -> None:
    explanation = explain_file(write(tmp_path, text), facts)
    assert [problem.line for problem in explanation.problems] == [line]


def test_missing_file(tmp_path: Path) -> None:
    assert not explain_file(tmp_path / "none.yaml", facts).ok


def test_draft_checkpoint_errors_point_at_the_draft(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model: meta/target\nspeculative_config:\n  method: draft_model\n"
        "  model: meta/tiny\n  num_speculative_tokens: 3\n  parallel_drafting: true\n",
    )
    [problem] = explain_file(path, facts).problems
    assert problem.line == 4 and "mask token" in problem.message


def test_foreign_applications_are_skipped(tmp_path: Path) -> None:
    path = write(
        tmp_path, "applications:\n- {name: other, import_path: json.tool:main, args: {x: 1}}\n"
    )
    explanation = explain_file(path, facts)
    assert explanation.ok and explanation.skipped == ("other (json.tool:main)",)


def test_flat_file_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path, "model: meta/target\nspec-method: ngram\nspec_tokens: 3\n")
    assert main([str(good)], facts) == 0
    assert "ngram with K=3, lossless" in capsys.readouterr().out
    assert main([str(good), "--json"], facts) == 0
    assert json.loads(capsys.readouterr().out)["apps"][0]["name"] == "engine"
    bad = write(tmp_path, "model: meta/target\nspec_tokens: 3\n")
    assert main([str(bad)], facts) == 1
    assert "without a speculative model" in capsys.readouterr().out
    assert main([], facts) == 2 and main(["--help"], facts) == 0


def test_what_this_version_refuses_fails_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path,
        "model: meta/target\nspeculative_config:\n  method: ngram\n  num_speculative_tokens: 3\n"
        "  enable_adaptive_verification: false\n  code_revision: abc\n",
    )
    assert main([str(path)], facts) == 1
    text = capsys.readouterr().out
    assert f"{path}:6: speculative_config.code_revision='abc'" in text and "remove it" in text


def test_kv_arithmetic(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model: meta/target\ntensor_parallel_size: 4\nblock_size: 16\n"
        "kv_cache_memory_bytes: 1GiB\nspeculative_config:\n  model: meta/tiny\n"
        "  num_speculative_tokens: 20\n  draft_tensor_parallel_size: 1\n",
    )
    [app] = explain_file(path, facts).apps
    target = 32 * 2 * 2 * 128 * 2  # layers, K and V, KV heads of one rank, head width, bytes
    draft = 22 * 2 * 4 * 64 * 2
    assert app.memory.target_bytes_per_token == target
    assert app.memory.draft_bytes_per_token == draft
    assert app.memory.num_blocks == 2**30 // (16 * (target + draft))
    assert app.memory.lookahead_blocks == 2


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    from specconfig.app_args import AppArgs
    from specconfig.options import SpeculativeOptions

    assert main(["--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == set(AppArgs.model_fields)
    inner = schema["$defs"]["SpeculativeOptions"]
    assert set(inner["properties"]) == set(SpeculativeOptions.model_fields) - {
        "tensor_parallel_size"
    }
    assert schema["additionalProperties"] is inner["additionalProperties"] is False
    for properties in (schema["properties"], inner["properties"]):
        assert all("description" in entry or "const" in entry for entry in properties.values())
    assert "peagle" in inner["properties"]["method"]["examples"]


PROGRAM = """
import sys
from specconfig.explaining.explain import main
code = main(sys.argv[1:])
heavy = [m for m in ("torch", "ray", "transformers") if m in sys.modules]
assert not heavy, heavy
sys.exit(code)
"""


def test_a_local_model_is_explained_in_under_a_second(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOL), encoding="utf-8")
    path = write(tmp_path, f"model: {tmp_path}\nspec_method: ngram\nspec_tokens: 3\n")
    best = 9.0
    for _ in range(3):
        # CPU time: the machine is shared.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", PROGRAM, str(path)], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert best < 1.0
