"""Whether bitwise equal output can be had: what is known of it before the start."""

from __future__ import annotations

from specconfig.decisions import DecisionLog, Source
from specconfig.engine import EngineConfig

_VECTOR = 8  # numbers of a head that the attention kernel takes at once


def note_batch_invariance(config: EngineConfig, log: DecisionLog, source: Source) -> None:
    """Say where `batch_invariant` cannot hold, and on what it depends elsewhere."""
    if not config.runtime.batch_invariant:
        return
    obstacle = _obstacle(config)
    if obstacle is not None:
        log.note("batch_invariant", False, "fallback", f"{obstacle}: last bits may differ")
        return
    where = "" if config.runtime.device == "cpu" else "depends on the device: "
    log.note(
        "batch_invariant",
        True,
        source,
        f"{where}float32 on a CPU with a C compiler gives it for most models; the start tests it "
        "and /server_info says",
    )


def _obstacle(config: EngineConfig) -> str | None:
    model = config.model
    if config.runtime.device == "cuda":
        return "not on GPUs"
    if model.dtype not in ("auto", "float32"):
        return f"not in {model.dtype}"
    if model.head_dim % _VECTOR:
        return f"not with head_dim {model.head_dim}, no multiple of {_VECTOR}"
    return None
