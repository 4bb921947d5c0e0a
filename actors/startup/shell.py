"""What the launcher puts on Ray, and how it speaks to it.

The processes import their role themselves: handing Ray a role's class would import torch and
transformers in the verifier's process too, seconds of every start and recovery, for nothing.
"""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar

import ray

from actors.errors import LoadError, WorkerLost
from actors.kvcache.sizing import KVLayers, RankMemory
from parallel.topology import RankIdentity, Rendezvous

LOAD_TIMEOUT_S = 1800.0

P = ParamSpec("P")
R = TypeVar("R")
Role = TypeVar("Role")


# --- what a role answers to -------------------------------------------------------------------


@dataclass(frozen=True)
class RankFacts:
    """What one rank knows of itself, as far as it has come."""

    role: str
    rank: int
    pid: int
    device: str
    cuda_visible_devices: str | None
    threads: int
    kv_layers: dict[str, KVLayers]
    parameters: int | None = None
    layers_compiled: bool | None = None
    batch_invariant: bool | None = None


@dataclass(frozen=True)
class LoadOrder:
    """How a rank is to load. `meeting`: where its role's ranks meet, None for a single one;
    `draft_meeting`: those of a drafter that is split over the target's processes. `replica` of
    `num_replicas`: among those over which experts are spread."""

    meeting: Rendezvous | None = None
    draft_meeting: Rendezvous | None = None
    replica: int = 0
    num_replicas: int = 1


class RankRole(ABC):
    """One rank of any role. Calls come in this order: identify and open_rendezvous (with several
    ranks), load, measure (but when it replaces another), allocate, warm_up, loop. `loop` returns
    when the verifier stops or is gone."""

    @abstractmethod
    def run(self, method: str, *args: Any) -> Any:
        """Result of `method`, run where it belongs."""

    @abstractmethod
    def identify(self) -> RankIdentity:
        """Node and device of this rank."""

    @abstractmethod
    def open_rendezvous(self, host: str) -> int:
        """Rank 0: the port at which the ranks meet, at `host`, an address of its node."""

    @abstractmethod
    def load(self, order: LoadOrder) -> RankFacts:
        """Meet the other ranks and load the weights."""

    @abstractmethod
    def measure(self) -> RankMemory:
        """What it keeps and what is left. All that share its device have loaded."""

    @abstractmethod
    def allocate(self, num_blocks: int) -> None:
        """Create the KV tensors."""

    @abstractmethod
    def warm_up(self) -> RankFacts:
        """Compile and prepare kernels. The facts again, with what is only known then."""

    @abstractmethod
    def loop(self, path: str, draft_path: str | None, generation: int) -> None:
        """Serve steps from the verifier at `path`. `draft_path`: where drafts of other processes
        reach target rank 0. `generation`: of the worker group, or of the drafter."""


class TargetRole(RankRole):
    """A target rank. `join_replicas` (with experts spread over replicas) comes before `measure`;
    `traffic` and `rebuild_drafter` may come while `loop` runs."""

    @abstractmethod
    def join_replicas(self, meeting: Rendezvous, replica: int, timeout_s: float) -> None:
        """Meet the same rank of the other replicas, with which the experts are shared.

        They may still be loading: `timeout_s` is how long they are waited for.
        """

    @abstractmethod
    def traffic(self) -> dict[str, dict[str, float]]:
        """Collective calls of the target's ranks so far, bytes handed to others and seconds, by
        operation."""

    @abstractmethod
    def rebuild_drafter(self, generation: int, meeting: Rendezvous | None) -> RankFacts:
        """Make a new drafter, or this rank's part of one, in this process. It serves from the
        first plan of `generation` on."""


# --- on Ray -----------------------------------------------------------------------------------


class RoleShell:
    """One rank of a role; the calls are those of the role's class."""

    role: ClassVar[str]  # qualified name of the class

    def __init__(self, config_json: str, rank: int) -> None:
        module, _, name = self.role.partition(":")
        self._rank: Any = getattr(importlib.import_module(module), name)(config_json, rank)

    def call(self, method: str, *args: Any) -> Any:
        """Result of the role's `method`."""
        return self._rank.run(method, *args)


class Target(RoleShell):
    """Named so that a process list says `ray::Target`."""

    role = "actors.target.actor:TargetActor"


class Draft(RoleShell):
    """Named so that a process list says `ray::Draft`."""

    role = "actors.draft.actor:DraftActor"


@dataclass(frozen=True)
class Pending(Generic[R]):
    """A call's result that is still to come."""

    ref: Any


class Remote(Generic[Role]):
    """A rank in its actor, with the methods of its role."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def ask(
        self, method: Callable[Concatenate[Role, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[R]:
        """Start `method` there."""
        return Pending(self._actor.call.remote(method.__name__, *args, **kwargs))

    def kill(self) -> None:
        """End the process. Idempotent."""
        ray.kill(self._actor)


def collect(pending: Sequence[Pending[R]], check: Callable[[], None] | None = None) -> list[R]:
    """Results of calls; the first failure is raised as what it was in the actor.

    First in time: ranks that wait for the failed one would only say that it did not come.
    `check` is called now and then meanwhile; what it raises ends the wait.

    Raises:
        LoadError: a call failed, or took longer than loading may.
        WorkerLost: an actor died.
    """
    deadline = time.monotonic() + LOAD_TIMEOUT_S
    refs = [call.ref for call in pending]
    left = list(refs)
    try:
        while left:
            wait_s = max(deadline - time.monotonic(), 0.0)
            done, left = ray.wait(left, timeout=wait_s if check is None else min(wait_s, 0.5))
            if check is not None:
                check()
            if not done and wait_s == 0.0:
                raise LoadError(f"{len(left)} actors did not answer in {LOAD_TIMEOUT_S:g} s")
            ray.get(done)
        return list(ray.get(refs))
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        raise LoadError(str(cause)) from error
    except ray.exceptions.RayActorError as error:
        raise WorkerLost(f"an actor died: {error}") from error


def first_failure(pending: Sequence[Pending[R]]) -> None:
    """Raise what ended a call that should still be running, if one has ended."""
    done, _ = ray.wait([call.ref for call in pending], timeout=0)
    if done:
        collect([Pending(ref) for ref in done])
