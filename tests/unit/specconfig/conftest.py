"""Test ids that show the setting: ``method=ngram,K=3`` instead of ``given0``."""

from __future__ import annotations

import pytest


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    if argname == "given" and isinstance(val, dict):
        return ",".join(f"{key}={value}" for key, value in val.items()) or "nothing"
    return None
