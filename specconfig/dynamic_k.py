"""The dynamic K table: ranges of batch size -> draft tokens per request."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from specconfig.errors import ConfigError

KTable = tuple[tuple[int, int, int], ...]

FIELD = "speculative_config.num_speculative_tokens_per_batch_size"
_RULE = "a non-empty list of [first, last, K] with inclusive ranges that start at 1"


def _error(value: object, gist: str, fix: str) -> ConfigError:
    return ConfigError(FIELD, value, _RULE, fix, message=f"{FIELD}: {gist}, got {value!r}")


def _triple(entry: object) -> tuple[int, int, int]:
    if not isinstance(entry, (list, tuple)) or len(entry) != 3:
        raise _error(entry, "each entry needs three integers", "write [first, last, K]")
    try:
        first, last, k = (int(part) for part in entry)
    except (TypeError, ValueError):
        raise _error(entry, "each entry needs three integers", "write [first, last, K]") from None
    if any(isinstance(part, float) and not part.is_integer() for part in entry):
        raise _error(entry, "each entry needs three integers", "write [first, last, K]")
    if first < 1 or last < 1:
        raise _error(entry, "batch sizes must be positive", "start ranges at 1")
    if first > last:
        raise _error(entry, f"range {first}-{last} is reversed", f"write [{last}, {first}, {k}]")
    if k < 0:
        raise _error(entry, "K must be 0 or more", "use 0 for no drafting")
    return first, last, k


def _from_mapping(table: Mapping[object, object]) -> list[tuple[object, object, object]]:
    entries: list[tuple[object, object, object]] = []
    for key, k in table.items():
        match = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", str(key))
        if match is None:
            raise _error(key, "a range is written 'first-last'", "for example '1-8'")
        entries.append((int(match[1]), int(match[2]), k))
    return entries


def parse_table(value: object) -> KTable:
    """Sorted, checked table. Accepts [first, last, K] triples or {'first-last': K}.

    Raises:
        ConfigError: not a list, empty, malformed, reversed, overlapping, or not starting at 1.
    """
    if isinstance(value, Mapping):
        value = _from_mapping(value)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _error(value, "must be a list", "write [[1, 8, 4], [9, 32, 2]]")
    if not value:
        raise _error(value, "must not be empty", "remove the key for a fixed K")
    table = tuple(sorted(_triple(entry) for entry in value))
    if table[0][0] != 1:
        raise _error(value, f"the first range must start at 1, not {table[0][0]}", "cover 1 too")
    for (_, last, _), (first, end, _) in itertools.pairwise(table):
        if first <= last:
            raise _error(
                value,
                f"ranges must be non-overlapping: {first}-{end} begins at or before {last}",
                f"start it at {last + 1}",
            )
    return table


def tokens_for_batch(table: KTable, num_requests: int, max_tokens: int) -> int:
    """K for a batch, clamped to ``max_tokens``; gaps and the tail carry the previous tier."""
    chosen = 0
    for first, _, k in table:
        if first > num_requests:
            break
        chosen = k
    return min(chosen, max_tokens)
