"""Process edge of a target rank: identity, start-up in stages, the step loop, a new drafter."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from actors.kvcache.sizing import KVLayers, RankMemory
from actors.startup.rank import RankActor
from actors.startup.shell import LoadOrder, RankFacts, TargetRole
from actors.startup.workers import ModelDrafter, build_drafter, resolve_device
from actors.steps.drafts import ConnectedDrafts, HostedDrafter
from actors.steps.serve import serve_target
from actors.steps.shared_drafts import Inbox, QColumns, SharedDrafts, all_agree
from actors.steps.target_step import DraftSource, TargetStep
from actors.target.runner import TargetRunner
from parallel.groups import SingleRank, TPGroup, join_group
from parallel.placement import DrafterHome, drafter_seat
from parallel.topology import Rendezvous
from parallel.transport.socket import CONNECT_TIMEOUT_S, FrameListener, FrameSocket


@dataclass(frozen=True)
class _Loaded:
    """`drafter`, in `hosted`: the one loaded with the target, if this rank has a part of it."""

    device: torch.device
    group: TPGroup
    target: TargetRunner
    hosted: HostedDrafter
    drafter: ModelDrafter | None


class TargetActor(RankActor, TargetRole):
    """One target rank, with the drafter that lives in its process, if one does."""

    role = "target"
    beside_loop = frozenset({"rebuild_drafter", "traffic"})
    _loaded: _Loaded

    def __init__(self, config_json: str, rank: int) -> None:
        super().__init__(config_json, rank)
        self._seat = drafter_seat(self._config)
        self._replicas: TPGroup = SingleRank()
        self._num_blocks = 0

    @property
    def _hosts_drafter(self) -> bool:
        seat = self._seat
        is_here = seat is not None and seat.home is DrafterHome.TARGET
        return is_here and seat is not None and self._rank < seat.num_parts

    def load(self, order: LoadOrder) -> RankFacts:
        device = resolve_device(self._config)
        group = self._join(order.meeting, device)
        target = TargetRunner(
            self._config, device, group, replica=order.replica, num_replicas=order.num_replicas
        )
        drafter: ModelDrafter | None = None
        hosted = HostedDrafter(None)
        if self._hosts_drafter:
            draft_group = self._join(order.draft_meeting, device)
            drafter = build_drafter(self._config, device, draft_group, target.host)
            is_split = draft_group.size > 1
            hosted = HostedDrafter(
                drafter,
                draft_group.close,
                (lambda well: all_agree(well, group, device)) if is_split else bool,
            )
        self._loaded = _Loaded(device, group, target, hosted, drafter)
        return self._all_facts(drafter)

    def join_replicas(self, meeting: Rendezvous, replica: int, timeout_s: float) -> None:
        self._replicas = join_group(
            meeting._replace(role=f"{meeting.role}-{self._rank}"),
            replica,
            self._loaded.device,
            host=self._meeting_places.get(meeting.host) if replica == 0 else None,
            meeting_timeout_s=timeout_s,
        )
        self._loaded.target.host.model.join_replicas(self._replicas)

    def measure(self) -> RankMemory:
        loaded = self._loaded
        return self._measured(loaded.device, self._layers(loaded.drafter), loaded.target.host)

    def allocate(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._loaded.target.host.allocate(num_blocks)
        if self._loaded.drafter is not None:
            self._loaded.drafter.allocate(num_blocks)

    def warm_up(self) -> RankFacts:
        drafter = self._loaded.drafter
        self._loaded.target.host.warm_up()
        if drafter is not None:
            drafter.warm_up()
        # From here on only `hosted` has it: a lost drafter makes room for the next.
        self._loaded = replace(self._loaded, drafter=None)
        return self._all_facts(drafter)

    def rebuild_drafter(self, generation: int, meeting: Rendezvous | None) -> RankFacts:
        loaded = self._loaded
        loaded.hosted.withdraw()
        group = self._join(meeting, loaded.device)
        try:
            drafter = build_drafter(self._config, loaded.device, group, loaded.target.host)
            drafter.allocate(self._num_blocks)
            drafter.warm_up()
        except BaseException:
            group.close()
            raise
        loaded.hosted.offer(drafter, generation, group.close)
        return self._all_facts(drafter)

    def traffic(self) -> dict[str, dict[str, float]]:
        group = self._loaded.group
        return {
            "calls": dict(group.num_calls),
            "bytes": dict(group.bytes_sent),
            "seconds": dict(group.seconds),
        }

    def loop(self, path: str, draft_path: str | None, generation: int) -> None:
        step = TargetStep(self._loaded.target, self._source(draft_path))
        connection = FrameSocket.connect(
            path, self.role, self._rank, generation, os.getpid(), CONNECT_TIMEOUT_S
        )
        try:
            serve_target(connection, step, answers=self._rank == 0)
        finally:
            connection.close()
            # Ranks that wait for this one in a collective learn it here.
            self._loaded.group.close()
            step.close()
            self._loaded.hosted.close()
            self._replicas.close()

    def _source(self, draft_path: str | None) -> DraftSource | None:
        """Where this rank's drafts come from."""
        seat, loaded = self._seat, self._loaded
        if seat is None or seat.home is DrafterHome.VERIFIER:
            return None
        if self._hosts_drafter and seat.num_parts == loaded.group.size:
            return loaded.hosted
        q = QColumns(loaded.target.host.model.vocab, seat.num_shares, loaded.device)
        inbox: Inbox | None = None
        if self._rank == 0 and seat.home is DrafterHome.TARGET:
            inbox = loaded.hosted
        elif self._rank == 0:
            assert draft_path is not None
            listener = FrameListener(draft_path, 0)
            drafts = ConnectedDrafts(listener, seat.num_shares, q.open)
            if loaded.group.size == 1:
                return drafts
            inbox = drafts
        return SharedDrafts(inbox, loaded.group, loaded.device, q)

    def _layers(self, drafter: ModelDrafter | None) -> dict[str, KVLayers]:
        layers = {"target": self._loaded.target.host.kv_layers("target")}
        if drafter is not None:
            layers["draft"] = drafter.kv_layers("draft")
        return layers

    def _all_facts(self, drafter: ModelDrafter | None) -> RankFacts:
        loaded = self._loaded
        host = loaded.target.host
        is_allocated = self._num_blocks > 0
        return replace(
            self._facts(loaded.device, self._layers(drafter)),
            parameters=host.model.num_parameters,
            layers_compiled=host.model.compiled if is_allocated else None,
            batch_invariant=host.model.is_batch_invariant if is_allocated else None,
        )
