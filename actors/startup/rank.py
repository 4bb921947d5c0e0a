"""What the processes of target and draft ranks are alike: identity, meeting place, facts."""

from __future__ import annotations

import logging
import os
from typing import Any, ClassVar

import ray
import torch

from actors.kvcache.sizing import KVLayers, RankMemory
from actors.startup.shell import RankFacts, RankRole
from actors.startup.workers import measure_memory, resolve_device
from actors.threads import ComputeThread, compute_alone
from parallel.groups import GroupHost, TPGroup, join_group
from parallel.topology import RankIdentity, Rendezvous
from specconfig.engine import EngineConfig


class RankActor(RankRole):
    """One rank's process. Knows Ray for its node's name and address only."""

    role: ClassVar[str]
    # What may be asked while `loop` runs; everything else runs in the compute thread.
    beside_loop: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config_json: str, rank: int) -> None:
        logging.basicConfig(level=logging.INFO)
        self._config = EngineConfig.from_json(config_json)
        self._rank = rank
        self._meeting_places: dict[str, GroupHost] = {}  # by address
        self._compute = ComputeThread()

    def run(self, method: str, *args: Any) -> Any:
        if method not in self.beside_loop:
            return self._compute.run(getattr(self, method), *args)
        compute_alone()
        return getattr(self, method)(*args)

    def identify(self) -> RankIdentity:
        device = resolve_device(self._config)
        uuid = None
        if device.type == "cuda":
            uuid = str(torch.cuda.get_device_properties(device).uuid)
        node = ray.get_runtime_context().get_node_id()
        return RankIdentity(self.role, self._rank, node, ray.util.get_node_ip_address(), uuid)

    def open_rendezvous(self, host: str) -> int:
        if host not in self._meeting_places:
            self._meeting_places[host] = GroupHost(host)
        return self._meeting_places[host].port

    def _measured(
        self, device: torch.device, layers: dict[str, KVLayers], host: object
    ) -> RankMemory:
        where = self.identify()
        memory = "memory" if where.device is None else f"GPU {where.device}"
        name = f"{memory} of node {where.node_ip}"
        return measure_memory(self._config, device, name, layers, host)

    def _join(self, meeting: Rendezvous | None, device: torch.device) -> TPGroup:
        own = self._meeting_places.get(meeting.host) if meeting is not None else None
        return join_group(meeting, self._rank, device, host=own)

    def _facts(self, device: torch.device, kv_layers: dict[str, KVLayers]) -> RankFacts:
        return RankFacts(
            role=self.role,
            rank=self._rank,
            pid=os.getpid(),
            device=str(device),
            cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            threads=torch.get_num_threads(),
            kv_layers=kv_layers,
        )
