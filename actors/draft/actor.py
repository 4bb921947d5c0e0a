"""Process edge of a draft rank."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from actors.kvcache.sizing import RankMemory
from actors.startup.rank import RankActor
from actors.startup.shell import LoadOrder, RankFacts
from actors.startup.workers import ModelDrafter, build_drafter, resolve_device
from actors.steps.serve import serve_draft
from actors.steps.shared_drafts import gather_rows
from parallel.groups import TPGroup
from parallel.placement import drafter_seat
from parallel.topology import split_range
from parallel.transport.socket import CONNECT_TIMEOUT_S, FrameSocket


@dataclass(frozen=True)
class _Loaded:
    device: torch.device
    group: TPGroup
    drafter: ModelDrafter


class DraftActor(RankActor):
    """One draft rank."""

    role = "draft"
    _loaded: _Loaded

    def load(self, order: LoadOrder) -> RankFacts:
        device = resolve_device(self._config)
        group = self._join(order.meeting, device)
        self._loaded = _Loaded(device, group, build_drafter(self._config, device, group))
        return self._all_facts()

    def measure(self) -> RankMemory:
        loaded = self._loaded
        layers = {"draft": loaded.drafter.kv_layers("draft")}
        return self._measured(loaded.device, layers, getattr(loaded.drafter, "host", None))

    def allocate(self, num_blocks: int) -> None:
        self._loaded.drafter.allocate(num_blocks)

    def warm_up(self) -> RankFacts:
        self._loaded.drafter.warm_up()
        return self._all_facts()

    def loop(self, path: str, draft_path: str | None, generation: int) -> None:
        """Drafts go to target rank 0, listening at `draft_path`: rank 0's where the draft is
        split, everyone's own share where each rank holds a whole draft."""
        seat = drafter_seat(self._config)
        assert seat is not None and draft_path is not None
        loaded, pid = self._loaded, os.getpid()
        target = None
        if self._rank == 0 or seat.num_shares > 1:
            target = FrameSocket.connect(
                draft_path, self.role, self._rank, generation, pid, CONNECT_TIMEOUT_S
            )
        connection = FrameSocket.connect(
            path, self.role, self._rank, generation, pid, CONNECT_TIMEOUT_S
        )
        part = self._rank if seat.num_parts > 1 else 0
        try:
            serve_draft(
                connection,
                loaded.drafter,
                target,
                share=self._rank if seat.num_shares > 1 else 0,
                num_shares=seat.num_shares,
                first_column=split_range(self._config.model.vocab_size, part, seat.num_parts)[0],
                gather=lambda rows: gather_rows(rows, loaded.group, loaded.device),
            )
        finally:
            connection.close()
            if target is not None:
                target.close()
            # Ranks that wait for this one in a collective learn it here.
            loaded.group.close()

    def _all_facts(self) -> RankFacts:
        loaded = self._loaded
        return self._facts(loaded.device, {"draft": loaded.drafter.kv_layers("draft")})
