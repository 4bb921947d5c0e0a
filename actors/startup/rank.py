"""Who a compute process is, for the launcher to check before the ranks of a role meet."""

from __future__ import annotations

import torch

from parallel.topology import RankIdentity


def rank_identity(
    role: str, rank: int, device: torch.device, node_id: str, node_ip: str
) -> RankIdentity:
    """Identity of this process, with the GPU's uuid where it computes on one."""
    uuid = None
    if device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(device).uuid)
    return RankIdentity(role, rank, node_id, node_ip, uuid)
