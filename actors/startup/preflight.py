"""What is decided before an engine starts, without loading torch: checks, KV sizing, tokenizer.

The verifier's process needs nothing heavier, and its start is part of every start and recovery.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

from actors.acceptance.base import AcceptanceMethod
from actors.errors import LoadError
from actors.kvcache.sizing import KVLayers, KVSizing, RankMemory, size_kv_cache
from actors.memory import available_bytes
from actors.startup.tokenizer import open_tokenizer
from actors.steps.protocols import LookupDrafter
from parallel.placement import DrafterHome, drafter_seat
from specconfig import readers
from specconfig.engine import EngineConfig
from specconfig.errors import ConfigError
from specconfig.model import DTYPE_BYTES

logger = logging.getLogger(__name__)


def import_drafter(config: EngineConfig) -> Any:
    """The class of the drafter that the method resolves to."""
    assert config.drafter_implementation is not None
    module, _, name = config.drafter_implementation.partition(":")
    return getattr(importlib.import_module(module), name)


def build_acceptance(config: EngineConfig) -> AcceptanceMethod:
    """The acceptance method that the configuration names, with its options."""
    module, _, name = config.acceptance_implementation.partition(":")
    method: AcceptanceMethod = getattr(importlib.import_module(module), name)(
        **config.acceptance_options
    )
    return method


def build_lookup_drafter(config: EngineConfig) -> LookupDrafter | None:
    """The drafter that lives in the verifier, or None when the config has none there."""
    seat = drafter_seat(config)
    if seat is None or seat.home is not DrafterHome.VERIFIER:
        return None
    drafter: LookupDrafter = import_drafter(config).from_config(config)
    return drafter


def check_supported(config: EngineConfig) -> None:
    """Refuse, before anything is loaded, what this engine does not run.

    Raises:
        LoadError: with the field, its value and what to change.
    """
    try:
        readers.check_supported(config)
    except ConfigError as error:
        raise LoadError(str(error)) from error


def check_q_carrier(config: EngineConfig, *, is_one_node: bool) -> None:
    """Refuse a drafter whose probabilities cannot reach every target rank.

    They go through shared memory, unless each target rank has its own part of the drafter.

    Raises:
        LoadError: its processes and the target's are on several nodes.
    """
    seat, spec = drafter_seat(config), config.speculative
    if seat is None or spec is None or spec.draft_sample_method != "probabilistic" or is_one_node:
        return
    size = config.parallel.tensor_parallel_size
    if seat.home is DrafterHome.OWN or (seat.home is DrafterHome.TARGET and seat.num_parts < size):
        raise LoadError(
            "speculative_config.draft_sample_method='probabilistic': the draft's probabilities "
            "reach the target through shared memory, but target and draft are on several nodes; "
            "fit the replica on one node, use placement: fused with a draft that is split like the "
            "target, or set draft_sample_method: greedy"
        )


def planned_memory(config: EngineConfig, device_type: str) -> RankMemory:
    """What a single process keeps as the config says it, before anything is loaded."""
    models = {"target": config.model}
    if config.draft_has_own_kv and config.draft_model is not None:
        models["draft"] = config.draft_model
    layers = []
    for owner, model in models.items():
        dtype: str = model.dtype
        if dtype == "auto":
            dtype = "float32" if device_type == "cpu" else model.checkpoint_dtype
        shape = (model.num_hidden_layers, model.num_key_value_heads, model.head_dim)
        layers.append(KVLayers(owner, (shape,), DTYPE_BYTES[dtype]))
    return RankMemory(device_type, tuple(layers), available_bytes=available_bytes())


def size_kv(config: EngineConfig, ranks: Sequence[RankMemory]) -> KVSizing:
    """Number of KV blocks for all processes of a replica, with printable arithmetic.

    Without an explicit budget a CPU takes what `max_num_seqs` requests of full length need, up to
    a share of the memory that is available; a GPU what `gpu_memory_utilization` leaves to KV.
    """
    sizing = size_kv_cache(
        ranks,
        block_size=config.cache.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        budget_bytes=config.cache.kv_cache_memory_bytes,
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
    )
    for line in sizing.lines:
        logger.info("KV cache: %s", line)
    return sizing


def load_tokenizer(config: EngineConfig) -> Any:
    """The fast tokenizer that decodes output, from the resolved tokenizer location."""
    return open_tokenizer(config.model.tokenizer, config.model.tokenizer_revision)
