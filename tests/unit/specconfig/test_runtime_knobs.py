"""`user_config`: what it sets, and one clear line for what it cannot."""

from __future__ import annotations

import pytest

from specconfig.errors import ConfigError
from specconfig.runtime_knobs import RuntimeKnobs


def test_what_is_given_and_what_is_not() -> None:
    assert RuntimeKnobs.of(None, 4) == RuntimeKnobs.of({}, 4) == RuntimeKnobs()
    knobs = RuntimeKnobs.of({"speculation_enabled": False, "max_speculative_tokens": 4}, 4)
    assert (knobs.speculation_enabled, knobs.max_speculative_tokens) == (False, 4)


@pytest.mark.parametrize(
    ("given", "field", "fix"),
    [
        ({"speculation_enable": False}, "user_config.speculation_enable", "'speculation_enabled'"),
        ({"max_speculative_tokens": 5}, "user_config.max_speculative_tokens", "to 4 or less"),
        ({"max_speculative_tokens": -1}, "user_config.max_speculative_tokens", ""),
        ({"max_speculative_tokens": True}, "user_config.max_speculative_tokens", ""),
        ({"speculation_enabled": "off"}, "user_config.speculation_enabled", ""),
        ([1], "user_config", "key: value"),
        ({7: 1}, "user_config.7", "remove"),
    ],
)
def test_what_cannot_work_is_refused(given: object, field: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeKnobs.of(given, 4)
    assert caught.value.field == field and fix in caught.value.fix
