"""A replica on a real Ray: placement, the output of one process, deaths, the end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors.errors import LoadError, RequestLost
from actors.requests import GenerateRequest, RunOutput
from actors.startup.in_process import build_in_process
from actors.startup.launch import Replica
from actors.threads import COMPUTE_NAME
from deploy.failures import is_intended
from specconfig import EngineArgs
from specconfig.engine import EngineConfig
from tests.tiny import CONSTANT_K
from tests.unit.parallel import toy

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("fake_gpu_ray")]

__all__ = ["toy"]  # its import registers the method
REPEATING = [70, 71, 72, 73] * 8


def config(target: Path, spec: dict[str, Any] | None, **kw: Any) -> EngineConfig:
    args: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "num_threads": 1,
        **kw,
    }
    if spec is not None:
        spec = {"num_speculative_tokens": 3, **CONSTANT_K, **spec}
    return EngineArgs(model=str(target), speculative_config=spec, **args).resolve()


@dataclass
class Answer:
    ids: list[int]
    logprobs: list[float]
    last: RunOutput


def ask(
    engine: Any, request_id: str, on_run: Callable[[int], None] = lambda n: None, **kw: Any
) -> Answer:
    async def run() -> Answer:
        ids: list[int] = []
        logprobs: list[float] = []
        request = GenerateRequest(
            request_id,
            REPEATING,
            **{"temperature": 0.0, "ignore_eos": True, "max_tokens": 40, **kw},
        )
        last = None
        runs = 0
        async for last in engine.generate(request):
            ids += last.token_ids
            logprobs += [entry.logprob for entry in last.logprobs or ()]
            runs += 1
            on_run(runs)
        assert last is not None
        return Answer(ids, logprobs, last)

    return asyncio.run(run())


def in_process(cfg: EngineConfig, **kw: Any) -> Answer:
    engine = build_in_process(cfg, warm_up=False)
    try:
        return ask(engine, "local", **kw)
    finally:
        engine.stop()


def actor_pids(replica: Replica) -> dict[str, int]:
    return {fact["role"]: fact["pid"] for fact in replica.describe()["actors"]}


def teams(pid: int) -> tuple[int, int]:
    """(threads of the compute thread's team, and what it has started itself, all threads)."""
    names = [p.read_text().strip() for p in Path(f"/proc/{pid}/task").glob("*/comm")]
    return names.count(COMPUTE_NAME), len(names)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("placement", ["colocated", "dedicated", "with the target"])
def test_draft_placements_share_devices_as_asked(
    tiny_pair: tuple[Path, Path], placement: str
) -> None:
    target, draft = tiny_pair
    if placement == "colocated":
        draft = target  # always right: a draft that comes back whole shows in what is accepted
    if placement == "with the target":
        cfg = config(
            target, {"method": "toy", "speculator_options": {"fails_in": "absorb"}}, num_threads=2
        )
    else:
        schedule = "goodput" if placement == "dedicated" else "constant"
        spec = {"model": str(draft), "num_speculative_tokens_schedule": schedule}
        cfg = config(target, spec, placement=placement)
    plain = in_process(config(target, None, device="cpu"), num_logprobs=0)
    replica = Replica.start(cfg)
    try:
        facts = {f["role"]: f for f in replica.describe()["actors"]}
        if placement == "with the target":
            assert set(facts) == {"target"}
        else:
            assert facts["draft"]["pid"] != facts["target"]["pid"]
            same = facts["draft"]["cuda_visible_devices"] == facts["target"]["cuda_visible_devices"]
            assert same == (placement == "colocated")
        assert len(replica.describe()["bundles"]) == (2 if placement == "dedicated" else 1)
        assert all(b["GPU"] == 1 for b in replica.describe()["bundles"])
        stats = replica.engine.stats
        if placement == "dedicated":
            # While there is no work it measures steps of all sizes, over its own transport.
            wait_until(lambda: {"1", "4"} <= set(stats.step_cost_s))
        got = ask(replica.engine, "a", num_logprobs=0)
        # Other processes, another transport, drafts: the same bits.
        assert (got.ids, got.logprobs) == (plain.ids, plain.logprobs)
        if placement == "dedicated":
            assert sum(stats.num_request_steps_per_k) > 0 == stats.num_draft_losses
        else:
            assert got.last.speculation.num_draft_tokens > 0
        sampled = {"temperature": 0.9, "seed": 4}
        off = ask(replica.engine, "b", speculation_enabled=False, **sampled)
        assert ask(replica.engine, "c", **sampled).ids == off.ids
        if placement == "colocated":
            a_killed_draft_costs_speed_and_comes_back(replica)
        if placement == "with the target":
            before = teams(facts["target"]["pid"])
            assert facts["target"]["threads"] == 2 <= before[0] <= 3
            a_failed_drafter_comes_back_in_the_target_s_process(replica)
            # The new drafter was loaded beside the steps, by a thread that makes no team.
            after = teams(facts["target"]["pid"])
            assert after[0] == before[0] and after[1] <= before[1]
            a_killed_target_fails_fast_and_says_why(replica)
        pids = actor_pids(replica).values()
    finally:
        replica.stop()
    for pid in pids:
        wait_until(lambda pid=pid: gone(pid), 20)  # type: ignore[misc]
    wait_until(lambda: ray.available_resources().get("GPU") == 4)


def a_killed_draft_costs_speed_and_comes_back(replica: Replica) -> None:
    plain = ask(replica.engine, "plain", speculation_enabled=False, max_tokens=120).ids
    pid = actor_pids(replica)["draft"]

    def kill(runs: int) -> None:
        if runs == 3:
            os.kill(pid, signal.SIGKILL)

    hurt = ask(replica.engine, "hurt", kill, max_tokens=120)
    assert hurt.ids == plain and hurt.last.error is None
    wait_until(lambda: replica.describe()["num_draft_rebuilds"] == 1)
    wait_until(lambda: replica.engine.status().draft_lost is None)
    healed = ask(replica.engine, "healed", max_tokens=120)
    assert healed.ids == plain
    drafted = healed.last.speculation.num_draft_tokens
    assert drafted > 0 and healed.last.speculation.num_accepted_tokens == drafted
    assert actor_pids(replica)["draft"] != pid


def a_failed_drafter_comes_back_in_the_target_s_process(replica: Replica) -> None:
    """It was told to fail after some steps, and has."""
    pid = actor_pids(replica)["target"]
    wait_until(lambda: replica.describe()["num_draft_rebuilds"] == 1)
    assert replica.engine.status().draft_lost is None
    wait_until(lambda: replica.describe()["drafter"] == "well")
    assert ask(replica.engine, "healed").last.speculation.num_draft_tokens > 0
    assert actor_pids(replica)["target"] == pid
    assert replica.engine.stats.num_draft_losses == 1


def a_killed_target_fails_fast_and_says_why(replica: Replica) -> None:
    pid = actor_pids(replica)["target"]

    def kill(runs: int) -> None:
        if runs == 2:
            os.kill(pid, signal.SIGKILL)

    started = time.monotonic()
    with pytest.raises(RequestLost, match="target"):
        ask(replica.engine, "doomed", kill, max_tokens=200)
    assert time.monotonic() - started < 20
    with pytest.raises(Exception, match="target"):
        replica.check_health()


def test_a_model_that_cannot_load_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    from tests.tiny import write_tiny_config

    broken = write_tiny_config(tmp_path / "no-weights")
    with pytest.raises(LoadError, match=r"no \*\.safetensors"):
        Replica.start(config(broken, None))
    wait_until(lambda: ray.available_resources().get("GPU") == 4)


def test_a_process_that_hangs_is_found_within_the_limit_of_a_step(
    tiny_pair: tuple[Path, Path],
) -> None:
    """A stopped draft costs speed and is replaced; a stopped target ends the replica, whole."""
    target, _ = tiny_pair
    replica = Replica.start(config(target, {"model": str(target)}, step_timeout_s=3.0))
    pids = actor_pids(replica)

    def stop(role: str) -> Callable[[int], None]:
        return lambda runs: os.kill(pids[role], signal.SIGSTOP) if runs == 3 else None

    try:
        plain = ask(replica.engine, "plain", speculation_enabled=False, max_tokens=120).ids
        hurt = ask(replica.engine, "hurt", stop("draft"), max_tokens=120)
        assert hurt.ids == plain and hurt.last.error is None
        wait_until(lambda: replica.describe()["num_draft_rebuilds"] == 1)
        healed = ask(replica.engine, "healed", max_tokens=120)
        assert healed.ids == plain and healed.last.speculation.num_draft_tokens > 0
        wait_until(lambda: gone(pids["draft"]))
        pids = actor_pids(replica)
        with pytest.raises(RequestLost, match=r"StepTimeout.*step_timeout_s"):
            ask(replica.engine, "doomed", stop("target"), max_tokens=200)
        assert not replica.engine.status().is_healthy
    finally:
        replica.stop()
    wait_until(lambda: all(gone(pid) for pid in pids.values()))
    wait_until(lambda: ray.available_resources().get("GPU") == 4)


def test_ray_says_who_ended_an_actor() -> None:
    """A replica that Serve ends is no request's fault; one that died may be."""

    class Sleeper:
        def pid(self) -> int:
            return os.getpid()

        def sleep(self) -> None:
            time.sleep(100)

    for ends_it, intended in ((ray.kill, True), (None, False)):
        actor: Any = ray.remote(Sleeper).options(num_cpus=0, max_concurrency=2).remote()
        pid = ray.get(actor.pid.remote())
        sleeping = actor.sleep.remote()
        if ends_it is not None:
            ends_it(actor)
        else:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError) as lost:
            ray.get(sleeping, timeout=60)
        assert is_intended(lost.value) == intended
