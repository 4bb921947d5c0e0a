"""What a private Ray's Serve is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy import serve_options


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(serve_options, "_set_here", set())
    monkeypatch.setattr(serve_options.importlib.util, "find_spec", lambda name: object())
    for name in [n for n in os.environ if n.startswith("RAY_")]:
        del os.environ[name]


def haproxy_paths() -> list[str]:
    return [v for n, v in os.environ.items() if "HAPROXY" in n and v.startswith("/")]


def test_each_private_ray_has_files_and_ports_of_its_own(tmp_path: Path) -> None:
    ports = set()
    for name in ("one", "two"):  # one after the other in one process
        serve_options.set_options(tmp_path / name)
        assert len(haproxy_paths()) == 4
        assert all(path.startswith(str(tmp_path / name / "haproxy")) for path in haproxy_paths())
        ports |= {v for n, v in os.environ.items() if n.endswith("_PORT")}
    assert len(ports) >= 2 and not ports & {"9101", "8404"}
    serve_options.unset_options()
    assert not [name for name in os.environ if name.startswith("RAY_")]


def test_who_sets_an_option_has_the_last_word(tmp_path: Path) -> None:
    os.environ["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"] = "7"
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
    serve_options.set_options(tmp_path)
    assert os.environ["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"] == "7"
    assert os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "0" and not haproxy_paths()


def test_without_its_package_serves_own_proxy_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_options.importlib.util, "find_spec", lambda name: None)
    serve_options.set_options(tmp_path)
    assert os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "0" and not haproxy_paths()
