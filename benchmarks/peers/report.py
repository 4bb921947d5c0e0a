"""What a comparison says: ratios ours over theirs, and a page of Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

Json = Mapping[str, Any]
# A system and its mode.
Side = tuple[str, str]
# What is held against what: the same kind of decoding on both sides, and ourselves without drafts.
PAIRS: Final[Sequence[tuple[Side, Side]]] = (
    (("paceline", "plain"), ("vllm", "plain")),
    (("paceline", "ngram"), ("vllm", "ngram")),
    (("paceline", "plain"), ("transformers", "plain")),
    (("paceline", "ngram"), ("transformers", "lookup")),
    (("paceline-gguf", "plain"), ("openvino", "plain")),
    (("paceline-gguf", "ngram"), ("openvino", "lookup")),
    (("paceline-gguf", "plain"), ("paceline", "plain")),
    (("paceline", "ngram"), ("paceline", "off")),
    (("paceline-gguf", "ngram"), ("paceline-gguf", "off")),
    (("paceline", "plain"), ("engine", "plain")),
    (("paceline", "ngram"), ("engine", "ngram")),
)
# Both sides' better mode.
BEST: Final[Sequence[tuple[str, str]]] = (("paceline", "vllm"),)
_BEST: Final = "best"


def ratios(measurements: Sequence[Json]) -> list[dict[str, Any]]:
    """For each pair and case: tokens/s of ours over theirs in each round where both have one."""
    speeds = _speeds(measurements)
    cases = list(dict.fromkeys(case for case, _, _ in speeds))
    made = []
    for case in cases:
        for ours, theirs in [*PAIRS, *(((a, _BEST), (b, _BEST)) for a, b in BEST)]:
            mine, other = (_of_side(speeds, case, side) for side in (ours, theirs))
            both = [mine[r] / other[r] for r in sorted(mine.keys() & other.keys())]
            if both:
                made.append(
                    {
                        "case": case,
                        "ours": " ".join(ours),
                        "peer": " ".join(theirs),
                        "tokens_per_s": {
                            "median": round(statistics.median(both), 3),
                            "min": round(min(both), 3),
                            "max": round(max(both), 3),
                            "rounds": len(both),
                        },
                    }
                )
    return made


def _speeds(measurements: Iterable[Json]) -> dict[tuple[str, Side, int], float]:
    """Tokens/s by case, side and round, of runs in which every answer ended."""
    return {
        (m["case"], (m["system"], m["mode"]), m["round"]): m["figures"]["output_tokens_per_s"]
        for m in measurements
        if "figures" in m and m["figures"]["num_completed"] and not _is_partial(m["figures"])
    }


def _is_partial(figures: Json) -> bool:
    return bool(figures["num_failed"] or figures["num_cut"])


def _of_side(
    speeds: Mapping[tuple[str, Side, int], float], case: str, side: Side
) -> dict[int, float]:
    system, mode = side
    found: dict[int, float] = {}
    for (of_case, (of_system, of_mode), number), speed in speeds.items():
        if of_case == case and of_system == system and mode in (of_mode, _BEST):
            found[number] = max(speed, found.get(number, 0.0))
    return found


def markdown(document: Json) -> str:
    """The document as a page: what it ran on, tokens/s, time to first token, ratios."""
    machine, settings = document["machine"], document["settings"]
    measurements = document["measurements"]
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items() if v)
    bandwidth = " / ".join(f"{value:g}" for value in document["read_gb_per_s"])
    floors = ", ".join(f"{name} {ms:g} ms" for name, ms in document["weights_read_ms"].items())
    parts = [
        "# Paceline beside other systems",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}; {versions}; {machine['started']}. Memory read at {bandwidth} GB/s, "
        f"so reading the weights once takes: {floors}.",
        f"{settings['max_tokens']} tokens an answer, greedy, {settings['seats']} seats, "
        f"rounds: {settings['rounds']}; medians of rounds. No cache of prompts anywhere. "
        f"{_load(measurements)}",
        "## Output tokens/s",
        _table(measurements, lambda f: f["output_tokens_per_s"], 1),
        "## Time to first token, ms (median of a run)",
        _table(measurements, _first_token, 0),
        "## Ratios of tokens/s",
        _rows(
            ["case", "ours", "peer", "ours / peer", "lowest", "highest"],
            [
                [r["case"], r["ours"], r["peer"],
                 *(f"{r['tokens_per_s'][k]:.2f}" for k in ("median", "min", "max"))]
                for r in document["ratios"]
            ],
        ),
    ]  # fmt: skip
    faults = [m for m in measurements if "error" in m or _is_partial(m["figures"])]
    if faults:
        parts += ["## Not measured", "\n".join(f"- {_fault(m)}" for m in faults)]
    return "\n\n".join(parts) + "\n"


def _load(measurements: Sequence[Json]) -> str:
    """How busy the machine was: the ended contestant's own load is in it, so it is near the cores
    where nothing else runs."""
    loads = [m["load_average"] for m in measurements if "load_average" in m]
    if not loads:
        return ""
    return f"Load average before a start: {min(loads):g} to {max(loads):g}."


def _first_token(figures: Json) -> float | None:
    spread = figures["time_to_first_token_ms"]
    return None if spread is None else spread["p50"]


def _fault(measurement: Json) -> str:
    where = " ".join(
        str(measurement[key]) for key in ("system", "mode", "case") if measurement.get(key)
    )
    what = measurement.get("error") or measurement["figures"]["errors"] or "cut"
    return f"{where}, round {measurement['round']}: {what}"


def _table(measurements: Sequence[Json], figure: Any, digits: int) -> str:
    found: dict[str, dict[str, list[float]]] = {}
    for m in measurements:
        if "figures" in m and (value := figure(m["figures"])) is not None:
            cells = found.setdefault(m["case"], {})
            cells.setdefault(f"{m['system']} {m['mode']}", []).append(value)
    columns = list(dict.fromkeys(side for cells in found.values() for side in cells))
    rows = [
        [case, *(f"{statistics.median(c[s]):.{digits}f}" if s in c else "" for s in columns)]
        for case, c in found.items()
    ]
    return _rows(["case", *columns], rows)


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
