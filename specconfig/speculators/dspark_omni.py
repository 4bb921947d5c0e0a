"""What a DSpark drafter must agree on with a Qwen3-Omni target."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from specconfig.errors import ConfigError
from specconfig.model import ModelConfig


def _fail(key: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(
        f"draft config {key!r}",
        value,
        allowed,
        "use the DSpark drafter made for this target",
        message=f"Qwen3-Omni DSpark: {key}={value!r}",
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _lookup(hf: Mapping[str, Any], key: str) -> Any:
    for section in ("dflash_config", "eagle_config"):
        found = (hf.get(section) or {}).get(key)
        if found is not None:
            return found
    return hf.get(key)


def check_contract(target: ModelConfig, draft: ModelConfig, k: int) -> None:
    """Raise for the first field of the draft that does not fit the thinker's text model."""
    hf = draft.hf_config
    if draft.architecture != "Qwen3OmniDSparkModel":
        raise _fail("architectures", draft.architecture, "Qwen3OmniDSparkModel")
    _check_block(hf, k)
    thinker = target.hf_config.get("thinker_config") or {}
    text = thinker.get("text_config") if isinstance(thinker, Mapping) else None
    if not isinstance(text, Mapping):
        raise _fail("target thinker_config.text_config", text, "a target with a text config")
    _check_shape(hf, text)
    _check_layers(hf, int(text["num_hidden_layers"]))
    _check_heads(hf, target)


def _check_block(hf: Mapping[str, Any], k: int) -> None:
    block = _lookup(hf, "block_size")
    block = _lookup(hf, "dspark_block_size") if block is None else block
    if not _is_int(block) or block < 1:
        raise _fail("block_size", block, "a positive integer")
    if k != block:
        raise _fail("num_speculative_tokens", k, f"exactly block_size={block}")


def _check_shape(hf: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    for key in ("target_hidden_size", "hidden_size"):
        if hf.get(key) != text["hidden_size"]:
            raise _fail(key, hf.get(key), f"the target text hidden_size {text['hidden_size']}")

    def geometry(config: Mapping[str, Any]) -> dict[str, Any]:
        heads = config.get("num_attention_heads")
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // (heads or 1),
        }

    wanted = geometry(text)
    for key, value in geometry(hf).items():
        if value != wanted[key]:
            raise _fail(key, value, f"the target's {wanted[key]}")


def _check_layers(hf: Mapping[str, Any], num_layers: int) -> None:
    ids = hf.get("target_layer_ids")
    rule = f"strictly increasing integers within [0, {num_layers - 1}]"
    if not isinstance(ids, (list, tuple)) or not ids or not all(_is_int(i) for i in ids):
        raise _fail("target_layer_ids", ids, rule)
    if any(b <= a for a, b in itertools.pairwise(ids)):
        raise _fail("target_layer_ids", ids, rule)
    if ids[0] < 0 or ids[-1] >= num_layers:
        raise _fail("target_layer_ids", ids, rule)
    if _lookup(hf, "use_aux_hidden_state") is not True:
        raise _fail("use_aux_hidden_state", _lookup(hf, "use_aux_hidden_state"), "true")


def _check_heads(hf: Mapping[str, Any], target: ModelConfig) -> None:
    rank = hf.get("markov_rank")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise _fail("markov_rank", rank, "a positive integer")
    if hf.get("markov_head_type") != "vanilla":
        raise _fail("markov_head_type", hf.get("markov_head_type"), "'vanilla'")
    if hf.get("sample_from_anchor") is not True:
        raise _fail("sample_from_anchor", hf.get("sample_from_anchor"), "true")
    if hf.get("dspark_bonus_anchor") is not False:
        raise _fail("dspark_bonus_anchor", hf.get("dspark_bonus_anchor"), "false")
    vocab, reduced = hf.get("vocab_size"), hf.get("draft_vocab_size")
    if not isinstance(vocab, int) or isinstance(vocab, bool) or vocab < 1:
        raise _fail("vocab_size", vocab, "a positive integer")
    reduced = vocab if reduced is None else reduced
    if not isinstance(reduced, int) or not 0 < reduced <= target.vocab_size:
        raise _fail("draft_vocab_size", reduced, f"1 to the target's {target.vocab_size}")
    mask = hf.get("mask_token_id", hf.get("dspark_noise_token_id"))
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < vocab:
        raise _fail("mask_token_id", mask, f"an id in [0, {vocab})")
    if _mentions(hf, "mrope_section") is not None:
        raise _fail("mrope_section", _mentions(hf, "mrope_section"), "no mrope_section anywhere")


def _mentions(node: Any, key: str) -> Any:
    if not isinstance(node, Mapping):
        return None
    if node.get(key) is not None:
        return node[key]
    for value in node.values():
        found = _mentions(value, key)
        if found is not None:
            return found
    return None
