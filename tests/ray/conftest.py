"""A private Ray with fake GPUs for the tests of this folder: this process drives it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.tiny import write_tiny_model

ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="package")
def fake_gpu_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray with 8 CPUs and 4 GPUs that exist in its books only, for the last files of this folder:
    the others start one of their own in this process, and two do not fit."""
    with pytest.MonkeyPatch.context() as patch:
        # A home of its own: Ray keeps its token there.
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", ROOT + os.pathsep + os.environ.get("PYTHONPATH", ""))
        ray.init(
            address="local",
            num_cpus=8,
            num_gpus=4,
            include_dashboard=False,
            object_store_memory=100_000_000,
            log_to_driver=False,
        )
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and a different, smaller draft."""
    root = tmp_path_factory.mktemp("pair")
    return write_tiny_model(root / "target"), write_tiny_model(root / "draft", seed=7, num_layers=1)
