"""Put an engine together: sizing, in-process workers, the drafter. No Ray here.

`build_in_process` is the whole engine in one process, for tests, benchmarks and offline use;
`actors.launch` does the same with actors.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from actors.errors import LoadError
from actors.kvcache.sizing import KVLayers, KVSizing, size_kv_cache
from actors.messages import DraftTokens, RowStats, StepPlan
from actors.protocols import LookupDrafter
from actors.step_client import InProcessStepClient
from actors.target.runner import TargetRunner
from actors.verifier.engine import VerifierEngine
from actors.verifier.limits import EngineLimits
from parallel.groups import TPGroup
from specconfig.engine import EngineConfig
from specconfig.model import ModelConfig

logger = logging.getLogger(__name__)

# Share of the memory still available that KV may take on a CPU when nothing was said.
_CPU_KV_SHARE = 0.4


class ModelHost(Protocol):
    """What target runner and draft drafters have in common for start-up."""

    def allocate(self, num_blocks: int) -> None: ...
    def warm_up(self) -> None: ...


class DraftModelHost(ModelHost, Protocol):
    """A drafter that runs in a draft process."""

    @property
    def num_kv_heads(self) -> int:
        """KV heads that this rank caches, in the layer that has most."""

    def run(self, plan: StepPlan) -> DraftTokens: ...


def resolve_device(config: EngineConfig) -> torch.device:
    """The device of a compute process: the configured one, or CUDA where there is one."""
    wanted = config.runtime.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise LoadError("device: cuda, but torch sees no CUDA device here; use device: cpu or auto")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def import_drafter(config: EngineConfig) -> Any:
    """The class that the resolved method names, checked to be there."""
    qualified = config.drafter_implementation
    assert qualified is not None
    module_name, _, attribute = qualified.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise LoadError(
            f"speculative_config.method={config.speculative.method if config.speculative else None}"
            f" resolves to the drafter {qualified}, which this installation does not contain "
            f"({error}); installed drafters are under actors.draft.drafters"
        ) from error


def build_lookup_drafter(config: EngineConfig) -> LookupDrafter | None:
    """The drafter that lives in the verifier, or None when the config has none there."""
    if config.drafter_host != "verifier":
        return None
    drafter: LookupDrafter = import_drafter(config).from_config(config)
    return drafter


def build_draft_host(
    config: EngineConfig, device: torch.device, group: TPGroup | None = None
) -> DraftModelHost:
    """Load the drafter of a draft process, or this rank's shard of it."""
    drafter: DraftModelHost = import_drafter(config)(config, device, group)
    return drafter


def check_supported(config: EngineConfig) -> None:
    """Refuse, before anything is loaded, what this engine does not run."""
    if config.parallel.data_parallel_size > 1 and config.parallel.enable_expert_parallel:
        raise LoadError(
            f"enable_expert_parallel with data_parallel_size={config.parallel.data_parallel_size}:"
            " experts would be spread over the replicas, whose forwards this version does not "
            "join; set data_parallel_size: 1 and num_replicas for more replicas, or remove "
            "enable_expert_parallel"
        )
    if config.drafter_host is None:
        return
    import_drafter(config)
    if config.drafter_host == "target":
        raise LoadError("drafters that run inside the target are not part of this version")


def kv_layers(
    owner: str, model: ModelConfig, device: torch.device, num_kv_heads: int | None = None
) -> KVLayers:
    """KV geometry of one rank; without `num_kv_heads` from the config alone, a single rank's."""
    from actors.model.loader import torch_dtype

    dtype = torch_dtype(model.dtype, device, model.checkpoint_dtype)
    return KVLayers(
        owner,
        model.num_hidden_layers,
        num_kv_heads or model.num_key_value_heads,
        model.head_dim,
        dtype.itemsize,
    )


def available_bytes() -> int:
    """Memory that can be taken without swapping: the smaller of host and cgroup."""
    from pathlib import Path

    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    used = Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


def size_kv(
    config: EngineConfig,
    device: torch.device,
    free_device_bytes: int | None,
    num_kv_heads: Mapping[str, int] | None = None,
) -> KVSizing:
    """Number of KV blocks for target and draft together, with printable arithmetic.

    `num_kv_heads`: what one rank of "target" and "draft" holds, where that is not all of them.

    Without an explicit budget a CPU takes what `max_num_seqs` requests of full length need, up to
    a share of the memory that is free; a CUDA device takes `gpu_memory_utilization` of what is
    free after loading.
    """
    heads = num_kv_heads or {}
    models = [kv_layers("target", config.model, device, heads.get("target"))]
    if config.draft_has_own_kv and config.draft_model is not None:
        models.append(kv_layers("draft", config.draft_model, device, heads.get("draft")))
    block_size = config.cache.block_size
    budget = config.cache.kv_cache_memory_bytes
    if budget is None and free_device_bytes is not None:
        budget = int(free_device_bytes * config.cache.gpu_memory_utilization)
    if budget is None:
        per_token = sum(m.bytes_per_token for m in models)
        blocks = -(-config.max_model_len // block_size) * config.scheduler.max_num_seqs + 1
        budget = min(blocks * block_size * per_token, int(available_bytes() * _CPU_KV_SHARE))
    sizing = size_kv_cache(budget, block_size, models, config.max_model_len)
    for line in sizing.lines:
        logger.info("KV cache: %s", line)
    return sizing


def load_tokenizer(config: EngineConfig) -> Any:
    """The fast tokenizer that decodes output, from the resolved tokenizer location."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            config.model.tokenizer,
            revision=config.model.tokenizer_revision,
            trust_remote_code=False,
        )
    except Exception as error:
        raise LoadError(f"cannot load the tokenizer {config.model.tokenizer!r}: {error}") from error


class FusedTarget:
    """A target with the draft model in its process: the drafts come first in the same call."""

    def __init__(self, target: TargetRunner, draft: DraftModelHost) -> None:
        self._client = InProcessStepClient(target, draft)

    def run(self, plan: StepPlan, drafts: DraftTokens | None) -> RowStats:
        del drafts  # nobody else proposes
        self._client.send(plan)
        return self._client.recv(0.0)


def build_in_process(
    config: EngineConfig, *, tokenizer: Any | None = None, warm_up: bool = True
) -> VerifierEngine:
    """A whole engine in this process: the same verifier and workers, called directly."""
    check_supported(config)
    if config.parallel.tensor_parallel_size > 1:
        raise LoadError(
            f"tensor_parallel_size={config.parallel.tensor_parallel_size}: each rank is a process; "
            "start a Replica (actors.launch), or set tensor_parallel_size: 1"
        )
    device = resolve_device(config)
    if config.runtime.num_threads:
        torch.set_num_threads(config.runtime.num_threads)
    target = TargetRunner(config, device)
    draft = build_draft_host(config, device) if config.drafter_host == "draft" else None
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    sizing = size_kv(config, device, free)
    for host in (target, draft):
        if host is not None:
            host.allocate(sizing.num_blocks)
            if warm_up:
                host.warm_up()
    return VerifierEngine(
        EngineLimits.from_config(config, sizing.num_blocks),
        InProcessStepClient(target, draft),
        tokenizer if tokenizer is not None else load_tokenizer(config),
        build_lookup_drafter(config),
    )
