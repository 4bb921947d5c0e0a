"""Bundles of one replica, and where each role sits in them. Pure: Ray only sees the result.

Bundle r belongs to target rank r and, when a draft model is colocated, to draft rank r on the
same device. The replica process (the verifier) sits in bundle 0. A dedicated draft gets bundles
of its own behind the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from specconfig.engine import EngineConfig

# CPU shares are bookkeeping: every process of a bundle may use all its cores, they take turns.
VERIFIER_CPUS = 0.1
INGRESS_CPUS = 0.1  # of the HTTP and gRPC front, in no bundle
TARGET_CPUS = 0.4
DRAFT_CPUS = 0.3
_BUNDLE_CPUS = VERIFIER_CPUS + TARGET_CPUS + DRAFT_CPUS


@dataclass(frozen=True)
class RolePlacement:
    """Where one actor goes: bundle index and its share of that bundle."""

    bundle: int
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True)
class ReplicaPlacement:
    """All of one replica. `drafts` is empty when no separate draft process exists."""

    bundles: tuple[dict[str, float], ...]
    targets: tuple[RolePlacement, ...]
    drafts: tuple[RolePlacement, ...]

    def shifted(self, first_bundle: int) -> ReplicaPlacement:
        """The same on a group where this replica's bundles begin at `first_bundle`: those of a
        gang's members lie one after another in one group."""
        return replace(
            self,
            targets=tuple(replace(p, bundle=p.bundle + first_bundle) for p in self.targets),
            drafts=tuple(replace(p, bundle=p.bundle + first_bundle) for p in self.drafts),
        )

    def ordered(self, nodes: Sequence[str], home: str) -> ReplicaPlacement:
        """The same with the ranks of one node side by side, the verifier's node first.

        Bundles of a group may lie on nodes in any order, and neighbours talk most. A draft rank
        moves with the target rank whose device it shares.

        Args:
            nodes: Node of each bundle of the group.
            home: The verifier's node.
        """
        rank_of_node = {node: index for index, node in enumerate(dict.fromkeys((home, *nodes)))}

        def by_node(bundles: Sequence[int]) -> dict[int, int]:
            old = sorted(set(bundles))
            new = sorted(old, key=lambda bundle: (rank_of_node[nodes[bundle]], bundle))
            return dict(zip(old, new, strict=True))

        moves = by_node([p.bundle for p in self.targets])
        moves |= by_node([p.bundle for p in self.drafts if p.bundle not in moves])
        return replace(
            self,
            targets=tuple(replace(p, bundle=moves[p.bundle]) for p in self.targets),
            drafts=tuple(replace(p, bundle=moves[p.bundle]) for p in self.drafts),
        )


def pack_strategy(config: EngineConfig) -> str:
    """Ray's strategy for one replica's bundles: on one node, or on one if possible."""
    return "STRICT_PACK" if config.parallel.strict_pack else "PACK"


class DrafterHome(StrEnum):
    """The process that a drafter lives in."""

    VERIFIER = "verifier"
    TARGET = "target"
    OWN = "own"


@dataclass(frozen=True)
class DrafterSeat:
    """Where the drafter of one replica lives, and on how many ranks.

    `num_parts`: ranks over which one drafter is split, 1 for a whole one. `num_shares`: processes
    with a whole drafter each, which divide the requests by slot. `reads_target`: it is made with
    the target's model and reads its states.
    """

    home: DrafterHome
    num_parts: int = 1
    num_shares: int = 1
    reads_target: bool = False

    @property
    def num_ranks(self) -> int:
        return max(self.num_parts, self.num_shares)


def drafter_seat(config: EngineConfig) -> DrafterSeat | None:
    """The one place that says where a drafter lives; None without one.

    An unsplit draft beside a split target would leave all devices but one idle while it drafts, so
    colocated ones share the requests.
    """
    size = config.parallel.tensor_parallel_size
    match config.drafter_host:
        case None:
            return None
        case "verifier":
            return DrafterSeat(DrafterHome.VERIFIER)
        case "target":
            return DrafterSeat(DrafterHome.TARGET, num_parts=size, reads_target=True)
        case "draft":
            parallel = config.draft_parallel
            num_parts = parallel.tensor_parallel_size if parallel is not None else 1
            if config.draft_placement == "fused":
                return DrafterSeat(DrafterHome.TARGET, num_parts)
            is_shared = num_parts == 1 and config.draft_placement == "colocated"
            return DrafterSeat(DrafterHome.OWN, num_parts, size if is_shared else 1)


def place_replica(config: EngineConfig, *, use_gpus: bool) -> ReplicaPlacement:
    """Bundles and shares for `config`.

    `use_gpus`: whether bundles ask Ray for one GPU each. Ray's fractions are bookkeeping too:
    memory on a shared device is divided by explicit byte budgets, not by Ray.
    """
    seat = drafter_seat(config)
    has_draft_process = seat is not None and seat.home is DrafterHome.OWN
    is_dedicated = has_draft_process and config.draft_placement == "dedicated"
    num_targets = config.parallel.tensor_parallel_size
    num_drafts = seat.num_ranks if seat is not None and has_draft_process else 0
    gpu = 1.0 if use_gpus else 0.0
    shares_device = has_draft_process and not is_dedicated
    target_gpu = gpu * (config.runtime.target_gpu_fraction if shares_device else 1.0)
    draft_gpu = gpu * (config.runtime.draft_gpu_fraction if shares_device else 1.0)

    bundle = {"CPU": round(_BUNDLE_CPUS, 3)}
    if use_gpus:
        bundle["GPU"] = 1.0
    bundles = [dict(bundle) for _ in range(num_targets + (num_drafts if is_dedicated else 0))]
    first_draft = num_targets if is_dedicated else 0
    return ReplicaPlacement(
        tuple(bundles),
        tuple(RolePlacement(rank, TARGET_CPUS, target_gpu) for rank in range(num_targets)),
        tuple(RolePlacement(first_draft + r, DRAFT_CPUS, draft_gpu) for r in range(num_drafts)),
    )
