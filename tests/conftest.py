"""What all tests share: the environment, and which tests run side by side."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import pytest

# Ray reads its token once per process, so all private clusters of a test session share one. Set
# before anything imports Ray.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Tests give Ray a home of its own. Kernels and compiled layers are built once all the same.
os.environ.setdefault("PACELINE_CACHE", str(Path("~/.cache/paceline").expanduser()))
# Two processes share two cores: threads that spin for each other would cost more than they give.
# Tests of threads ask for them by number. Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Groups that start first, in this order, because they take longest. One process runs a group:
# folders that share processes or models make them once. The served application has a Ray of its
# own; it comes last, when the other process is nearly through with its Rays.
_FIRST = ("tests/ray", "tests/parity/test_demo_model.py", "tests/architecture")
_LAST = ("tests/serve",)


def _group(nodeid: str) -> str:
    path = nodeid.partition("::")[0]
    folder = path.rpartition("/")[0]
    return path if folder in ("tests/parity", "tests/unit/engine") else folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: number - len(_FIRST) for number, name in enumerate(_FIRST)}
    ranks |= {name: number + 1 for number, name in enumerate(_LAST)}
    items.sort(key=lambda item: ranks.get(_group(item.nodeid), 0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole groups to the processes of `pytest -n 2`, in the order above."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)
