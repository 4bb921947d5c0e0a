"""What is wrong with a checkpoint's tensors, in words: missing, unexpected, of another shape.

A weight that is not there is a model that loads, runs and answers noise; so nothing is left to a
random start, and nothing is read past without a word.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

_SHOWN = 8
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
_MTP = re.compile(r"(?:^|\.)(?:mtp|nextn)(?:_\w+)?\.")
_MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def faults_in_words(
    missing: Iterable[str],
    unexpected: Iterable[str] = (),
    wrong_shapes: Mapping[str, tuple[Sequence[int], Sequence[int]]] | None = None,
) -> str | None:
    """ "misses ...; has, unexpectedly, ...", with what it probably means; None: nothing is wrong.

    Args:
        wrong_shapes: By name: (shape in the checkpoint, shape in the model).
    """
    missing, unexpected = sorted(missing), sorted(unexpected)
    shapes = [
        f"{name} {list(there)} where {list(wanted)} was expected"
        for name, (there, wanted) in sorted((wrong_shapes or {}).items())
    ]
    faults = {"misses": missing, "has, unexpectedly,": unexpected, "has": shapes}
    told = [f"{verb} {_listed(names)}" for verb, names in faults.items() if names]
    if not told:
        return None
    return "; ".join(told) + f" ({_meaning(missing, unexpected, bool(shapes))})"


def without_known(
    model: Any, missing: Iterable[str], unexpected: Iterable[str]
) -> tuple[set[str], set[str]]:
    """`missing` and `unexpected` without what the transformers `model` does without on purpose:
    what its class lists, buffers of old checkpoints, modules that predict further tokens."""
    left = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    model._adjust_missing_and_unexpected_keys(left)
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else None
    further = max((int(getattr(config, key, None) or 0) for key in _MTP_COUNTS), default=0)
    if further:
        begin = int(config.num_hidden_layers)  # type: ignore[union-attr]
        left.unexpected_keys = {
            name for name in left.unexpected_keys if not _is_further(name, begin, begin + further)
        }
    return left.missing_keys, left.unexpected_keys


def _is_further(name: str, begin: int, end: int) -> bool:
    layer = _LAYER.search(name)
    return bool(_MTP.search(name)) or (layer is not None and begin <= int(layer[1]) < end)


def _meaning(missing: Sequence[str], unexpected: Sequence[str], has_shapes: bool) -> str:
    prefix = _prefix(missing, unexpected)
    if prefix:
        return f"the checkpoint's names begin with {prefix!r}, which this model's do not: rename"
    prefix = _prefix(unexpected, missing)
    if prefix:
        return f"the checkpoint's names lack the prefix {prefix!r} that this model's have: rename"
    if list(missing) == ["lm_head.weight"] and not unexpected:
        return "if the head is the embedding, set tie_word_embeddings: true in config.json"
    if has_shapes or unexpected:
        return "config.json and the weights are not of one model"
    return "the checkpoint is incomplete, or config.json is another model's"


def _prefix(short: Sequence[str], long: Sequence[str]) -> str | None:
    """What most of the names in `long` have before one of `short`; None: there is nothing such."""
    wanted = set(short)
    found: Counter[str] = Counter()
    for name in long:
        parts = name.split(".")
        for cut in range(1, len(parts)):
            if ".".join(parts[cut:]) in wanted:
                found[".".join(parts[:cut]) + "."] += 1
                break
    if not found:
        return None
    prefix, count = found.most_common(1)[0]
    return prefix if 2 * count > len(short) else None


def _listed(names: Sequence[str]) -> str:
    if len(names) <= _SHOWN:
        return ", ".join(names)
    return f"{len(names)} tensors: {', '.join(names[:_SHOWN])} and {len(names) - _SHOWN} more"
