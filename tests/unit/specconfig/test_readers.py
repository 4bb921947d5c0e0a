"""Every option has a reader, or is refused: the table is held against the code."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specconfig.app_args import AppArgs
from specconfig.draft_law import DraftLaw
from specconfig.errors import ConfigError
from specconfig.explaining.explain import READ
from specconfig.options import SpeculativeOptions
from specconfig.readers import (
    ENGINE_READERS,
    SPECULATIVE_READERS,
    Entry,
    Fixed,
    Planned,
    Reader,
    check_supported,
)
from tests.unit.specconfig.catalog import engine

ROOT = Path(__file__).parents[3]
ENTRIES: dict[str, Entry] = {
    **ENGINE_READERS,
    **{f"speculative_config.{name}": entry for name, entry in SPECULATIVE_READERS.items()},
}
TINY = {"model": "meta/tiny", "K": 3}


@cache
def tree(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def reads(node: ast.AST) -> set[str]:
    """Every dotted chain that the code reads: ``self.config.cache.block_size`` and so on."""
    return {ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def find(reader: Reader) -> ast.AST:
    module, _, qualname = reader.where.partition(":")
    node: ast.AST = tree(module)
    for name in qualname.split("."):
        node = next(
            part for part in ast.iter_child_nodes(node) if getattr(part, "name", None) == name
        )
    return node


@cache
def read_anywhere() -> dict[str, set[str]]:
    """Last name of each chain in the code that runs, outside the configuration -> its modules."""
    found: dict[str, set[str]] = {}
    for package in ("actors", "parallel", "deploy"):
        for path in (ROOT / package).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for chain in reads(tree(module)):
                found.setdefault(chain.rpartition(".")[2], set()).add(module)
    return found


def test_every_field_is_in_the_table() -> None:
    assert set(ENGINE_READERS) == set(AppArgs.model_fields)
    assert set(SPECULATIVE_READERS) == set(SpeculativeOptions.model_fields)


@pytest.mark.parametrize(
    "reader", sorted({e for e in ENTRIES.values() if isinstance(e, Reader)}, key=str), ids=str
)
def test_the_reader_reads_it(reader: Reader) -> None:
    chains = reads(find(reader))
    assert any(f".{chain}".endswith(f".{reader.attribute}") for chain in chains), sorted(chains)


def test_nobody_acts_on_what_is_planned() -> None:
    for name, entry in ENTRIES.items():
        if isinstance(entry, Planned):
            readers = read_anywhere().get(name.rpartition(".")[2], set())
            assert readers == ({entry.guard} if entry.guard else set()), name


def test_explain_shows_only_what_is_read() -> None:
    assert {*READ, *DraftLaw.model_fields} <= set(read_anywhere())


OTHER_VALUE: dict[str, Any] = {
    "suffix_decoding_max_tree_depth": 7, "suffix_decoding_max_cached_requests": 7,
    "suffix_decoding_max_spec_factor": 0.5, "suffix_decoding_min_token_prob": 0.5,
    "draft_load_config": {"format": "x"}, "draft_model_config": {"hf_config": {}},
    "draft_sample_method": "probabilistic", "moe_backend": "triton",
    "attention_backend": "flashinfer", "kv_cache_dtype": "fp8", "quantization": "awq",
    "code_revision": "r",
}  # fmt: skip
ON_OTHER_METHODS = {
    "draft_lm_head_quantization", "index_share_for_mtp_iteration", "dspark_draft_topk",
    "xpress_topc", "enable_adaptive_verification",
}  # fmt: skip
"""Refused for a draft model when the plan is made; their own methods cannot start."""


@pytest.mark.parametrize(
    "name", [n for n, e in SPECULATIVE_READERS.items()
             if isinstance(e, Planned) and n not in ON_OTHER_METHODS]
)  # fmt: skip
def test_planned_options_are_refused_at_start_unless_they_do_nothing(name: str) -> None:
    default = SpeculativeOptions.model_fields[name].default
    check_supported(engine({**TINY, name: default}))
    value = OTHER_VALUE.get(name, True)
    config = engine({**TINY, name: value})
    with pytest.raises(
        ConfigError, match=r"is not part of this version \(.*\); fix: remove it"
    ) as raised:
        check_supported(config)
    assert raised.value.field == f"speculative_config.{name}"
    assert raised.value.value == config.speculative.requested[name]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"method": "medusa", "model": "org/medusa-head"},
         r"method='medusa' needs actors\.draft\.drafters\.medusa:.*allowed: draft_model, ngram"),
        ({"method": "ngram", "K": 3, "rejection_sample_method": "synthetic",
          "synthetic_acceptance_length": 2},
         r"rejection_sample_method='synthetic' needs actors\.acceptance\.synthetic:.*: standard"),
        ({"method": "ngram", "K": 3, "rejection_sample_method": "no_such_package.rules:Mine"},
         r"needs no_such_package\.rules:Mine"),
    ],
)  # fmt: skip
def test_missing_implementations_are_refused_with_what_is_there(
    given: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        check_supported(engine(given))


def test_fixed_options_have_a_reason() -> None:
    assert all(entry.why for entry in ENTRIES.values() if isinstance(entry, Fixed))


def test_what_runs_today_is_not_refused() -> None:
    for given in (None, TINY, {"method": "ngram", "K": 3}, {"method": "ngram_gpu", "K": 3}):
        check_supported(engine(given))
