"""Checkpoint values the engine needs at run time, resolved and range-checked up front."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from specconfig.errors import FormatError
from specconfig.speculators.resolution import Resolution

MASK_KEYS = (
    "dflash_config.mask_token_id", "mask_token_id", "dspark_noise_token_id", "pard_token",
    "ptd_token_id",
)  # fmt: skip
"""Where checkpoints keep the input id of a masked position, in order of preference."""


def _get(hf: Mapping[str, Any], path: str) -> Any:
    section, _, name = path.rpartition(".")
    place = hf.get(section) if section else hf
    return place.get(name) if isinstance(place, Mapping) else None


def read_checkpoint_values(res: Resolution, taps_layers: bool) -> None:
    """Fill mask token and, where the method taps them, layers of a checkpoint drafter."""
    if res.draft_hf is None or res.draft is None:
        return
    hf = res.draft.hf_config
    if res.values["parallel_drafting"]:
        res.mask_token_id = _mask_token(hf, res)
    if taps_layers:
        res.aux_layer_ids = _aux_layers(hf, res)


def _mask_token(hf: Mapping[str, Any], res: Resolution) -> int:
    assert res.draft is not None
    for path in MASK_KEYS:
        value = _get(hf, path)
        if value is None:
            continue
        if not 0 <= int(value) < res.draft.vocab_size:
            raise FormatError(
                path,
                value,
                f"an id below the draft's vocab_size {res.draft.vocab_size}",
                "repair the draft's config.json",
            )
        return int(value)
    raise FormatError(
        "mask token",
        None,
        f"one of {list(MASK_KEYS)} in the draft's config.json",
        "use a draft that was trained for parallel drafting, or remove parallel_drafting",
        message=f"{res.draft.model!r} declares no mask token, which parallel drafting needs",
    )


def _aux_layers(hf: Mapping[str, Any], res: Resolution) -> tuple[int, ...] | None:
    """Ids in our convention: id i is the residual stream after i layers."""
    found, origin = _aux_source(hf)
    if found is None:
        return None
    shift = 1 if origin.endswith("target_layer_ids") else 0
    if origin == "dspark_target_layer_ids" and hf.get("model_type") == "deepseek_v41":
        shift = 0
    ids = tuple(int(index) + shift for index in found)
    layers = res.require_target().num_hidden_layers
    rule = f"increasing ids from 0 to the target's {layers} layers"
    if any(after <= before for before, after in itertools.pairwise(ids)):
        raise FormatError(
            origin,
            list(found),
            rule + ", each once",
            "sort and de-duplicate the ids; features are concatenated in ascending order",
        )
    if ids[0] < 0 or ids[-1] > layers:
        raise FormatError(origin, list(found), rule, "use the head trained for this target")
    return ids


def _aux_source(hf: Mapping[str, Any]) -> tuple[list[int] | None, str]:
    for path in (
        "eagle_aux_hidden_state_layer_ids", "dflash_config.target_layer_ids",
        "dspark_target_layer_ids", "target_layer_ids", "dflash_config.layer_ids",
        "eagle_config.layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids",
    ):  # fmt: skip
        value = _get(hf, path)
        if value:
            return list(value), path
    return None, ""
