"""Load one rank's shard of a model: plan on empty weights, read only what it keeps, connect."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from actors.errors import LoadError
from actors.model.interface import ATTENTION_NAME
from actors.model.weights import checkpoint_folder
from parallel.checkpoint import ShardReader
from parallel.experts import ExpertExchange, ExpertShare
from parallel.groups import TPGroup
from parallel.shard import ShardPlan, connect_shard, empty_parameters, plan_shard
from parallel.topology import TopologyError

logger = logging.getLogger(__name__)


def load_shard(
    location: str,
    config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: TPGroup,
    experts: ExpertShare | None,
    exchange: ExpertExchange | None = None,
    revision: str | None = None,
) -> nn.Module:
    """This rank's shard of `location` (directory or hub id) with the transformers `config`.

    `experts`: its share of whole experts, where these are spread; with other replicas, they talk
    through `exchange`.

    Raises:
        LoadError: the model does not split over the group's ranks, or its files do not fit it.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    try:
        # Planned on a model without weights: no rank ever holds more than its own part.
        with empty_parameters(), no_init_weights():
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=ATTENTION_NAME
            )
        plan = plan_shard(model, group.rank, group.size, experts=experts)
        for note in plan.notes:
            logger.warning("%s: %s", location, note)
        reader = ShardReader(checkpoint_folder(location, revision), model, dtype, device)
        try:
            fill(model, plan, reader)
        finally:
            reader.close()
        connect_shard(model, plan, group, exchange)
    except TopologyError as error:
        raise LoadError(f"{location}: {error}") from error
    logger.info(
        "rank %d of %d read %.1f MB of %s",
        group.rank, group.size, reader.num_bytes_read / 1e6, location,
    )  # fmt: skip
    return model  # type: ignore[no-any-return]


def fill(model: Any, plan: ShardPlan, reader: ShardReader) -> None:
    """Give every parameter and stored buffer of `model` this rank's part of its weights.

    Raises:
        TopologyError: the checkpoint lacks a weight, has another shape, or has more than belongs
            to the model.
    """
    # A tied pair is stored under either name, or both: what can be taken from its partner is not
    # read a second time, and stays one tensor on a rank that holds both alike.
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    shared = {name for name in tied if name not in reader or tied[name] in reader}
    reader.check(model, tied)
    for name, tensor in list(model.state_dict(keep_vars=True).items()):
        if name in shared or name not in reader:  # or one that the class does without
            continue
        owner, leaf = _owner(model, name)
        loaded = reader.read(name, plan.cuts.get(name))
        if isinstance(tensor, nn.Parameter):
            owner._parameters[leaf] = nn.Parameter(loaded, requires_grad=False)
        else:
            owner._buffers[leaf] = loaded
    for name in shared:
        _share(model, name, tied[name], plan)


def _share(model: Any, name: str, source: str, plan: ShardPlan) -> None:
    """Tied weights: the same tensor, or this rank's rows of it where only one of them is cut."""
    source_owner, source_leaf = _owner(model, source)
    owner, leaf = _owner(model, name)
    weight = source_owner._parameters[source_leaf]
    cut = plan.cuts.get(name)
    if cut is not None and plan.cuts.get(source) is None:
        begin, end = cut.ranges[0]
        weight = nn.Parameter(weight.narrow(cut.dim, begin, end - begin), requires_grad=False)
    owner._parameters[leaf] = weight


def _owner(model: nn.Module, name: str) -> tuple[Any, str]:
    parent, _, leaf = name.rpartition(".")
    return model.get_submodule(parent), leaf
