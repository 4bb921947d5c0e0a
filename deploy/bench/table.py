"""A benchmark as text: a column for each run, a row for each figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

Json = Mapping[str, Any]
_BUSY_CLIENT: Final = 0.5


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns, the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def table(document: Json) -> str:
    """The table of a whole document of `paceline bench`, with notes on what to mind."""
    runs = document["runs"]
    rows = [["", *(load_name(run["load"]) for run in runs)]]
    for name, figure in _FIGURES:
        cells = [figure(run) for run in runs]
        if any(cell != "-" for cell in cells):
            rows.append([name, *cells])
    parts = [_heading(document), aligned(rows)]
    for run in runs:
        if categories := run.get("categories"):
            parts.append(_by_category(load_name(run["load"]), categories))
    if notes := _notes(document):
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def load_name(load: Json) -> str:
    """A run's column: how many clients, or how many requests a second."""
    if "rate" in load:
        return f"{load['rate']:g} requests/s"
    return f"{load['clients']} client" + ("s" if load["clients"] != 1 else "")


def _heading(document: Json) -> str:
    length = "exactly" if document["ignore_eos"] else "at most"
    return (
        f"{document['url']}  {document['model']}\n"
        f"{document['endpoint']}, prompts {document['prompts']}, {length} "
        f"{document['max_tokens']} tokens each, temperature {document['temperature']:g}"
    )


def _number(key: str, digits: int = 1) -> Callable[[Json], str]:
    return lambda run: "-" if run.get(key) is None else f"{run[key]:.{digits}f}"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _spread(key: str) -> Callable[[Json], str]:
    def cell(run: Json) -> str:
        spread = run.get(key)
        return "-" if not spread else " / ".join(_ms(spread[p]) for p in ("p50", "p90", "p99"))

    return cell


def _speculation(key: str, digits: int = 2) -> Callable[[Json], str]:
    def cell(run: Json) -> str:
        found = run.get("speculation")
        return "-" if not found or found[key] is None else f"{found[key]:.{digits}f}"

    return cell


def _requests(run: Json) -> str:
    return f"{run['num_completed']} / {run['num_failed']} / {run['num_cut']}"


def _prompt_tokens(run: Json) -> str:
    return f"{run['prompt_tokens']} ({run['cached_tokens']})" if run["prompt_tokens"] else "-"


_FIGURES: Final[Sequence[tuple[str, Callable[[Json], str]]]] = (
    ("requests done / failed / cut", _requests),
    ("prompt tokens (from a cache)", _prompt_tokens),
    ("output tokens/s", _number("output_tokens_per_s")),
    ("requests/s", _number("requests_per_s", 2)),
    ("first token ms, p50 / p90 / p99", _spread("time_to_first_token_ms")),
    ("ms per output token, the same", _spread("time_per_output_token_ms")),
    ("ms between events, the same", _spread("event_gap_ms")),
    ("whole answer ms, the same", _spread("latency_ms")),
    ("tokens per event", _number("tokens_per_event", 2)),
    ("acceptance length", _speculation("acceptance_length")),
    ("acceptance rate", _speculation("acceptance_rate")),
    ("mean K", _speculation("mean_k")),
    ("this client's CPU, % of a core", lambda run: f"{run['client_cpu_share'] * 100:.1f}"),
)


def _by_category(name: str, categories: Json) -> str:
    rows = [["category, " + name, "ms per output token", "tokens per event", "acceptance length"]]
    rows += [
        [
            category,
            _spread("time_per_output_token_ms")(figures),
            _number("tokens_per_event", 2)(figures),
            _speculation("acceptance_length")(figures),
        ]
        for category, figures in categories.items()
    ]
    return aligned(rows)


def _notes(document: Json) -> list[str]:
    notes = []
    if not document["ignore_eos"]:
        notes.append(
            "The server does not take ignore_eos: answers end where the model ends them, so their "
            "lengths differ between servers; compare ms per output token."
        )
    if not document["has_usage"]:
        notes.append(
            "The server sends no usage in a stream: tokens are counted as events, too few where "
            "an event carries several."
        )
    for run in document["runs"]:
        name = load_name(run["load"])
        if run["stopped"]:
            notes.append(f"{name}: {run['stopped']}; figures are of the answers that had ended.")
        notes += [f"{name}: {count} x {error}" for error, count in run["errors"].items()]
        if run["client_cpu_share"] > _BUSY_CLIENT:
            notes.append(
                f"{name}: this client used {run['client_cpu_share'] * 100:.0f} % of a core: it may "
                "be the limit; run it on another machine."
            )
    return notes
