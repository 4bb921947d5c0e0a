"""Options of `paceline bench`. Light: the command's help needs no more."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them to the command's parser."""
    parser.add_argument("url", help="the server, for example http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--api-key", help="default: $PACELINE_API_KEY")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--clients", type=list_of(count), default=[1], metavar="N,N",
        help="closed loop: so many clients that never pause, a run for each number (1)",
    )  # fmt: skip
    load.add_argument(
        "--rate", type=list_of(positive), metavar="R,R",
        help="open loop: so many requests a second as a Poisson process, a run for each number",
    )  # fmt: skip
    parser.add_argument(
        "--num-requests", type=count, metavar="N",
        help="requests of a run (4 a client, at least 8; 32 with --rate)",
    )  # fmt: skip
    parser.add_argument("--max-tokens", type=count, default=128, metavar="N", help="of an answer")
    parser.add_argument(
        "--prompts", default="chat", metavar="chat|rewrite|FILE",
        help="questions, texts to rewrite (drafters by lookup like them), or a JSONL file (chat)",
    )  # fmt: skip
    parser.add_argument("--categories", metavar="A,B", help="only these of the prompts")
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    parser.add_argument("--temperature", type=_temperature, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and of sampling (0)")
    parser.add_argument(
        "--extra-body", type=_json_object, metavar="JSON",
        help="fields for every request, for example '{\"speculation\": {\"enabled\": false}}'",
    )  # fmt: skip
    parser.add_argument(
        "--warmup", type=_count_or_none, metavar="N",
        help="requests before each run that do not count (1 a client; 1 with --rate)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=positive, default=300.0, metavar="S",
        help="seconds that an answer may take (300)",
    )  # fmt: skip
    parser.add_argument(
        "--max-seconds", type=positive, default=1800.0, metavar="S",
        help="seconds that a run may take; what is open then is cut (1800)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures there")


def list_of(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """An option's type: what `read` takes, comma-separated."""
    return lambda text: [read(part) for part in text.split(",")]


def count(text: str) -> int:
    """An option's type: a whole number from 1 on."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else count(text)


def positive(text: str) -> float:
    """An option's type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value > 0 and math.isfinite(value):
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")


def _temperature(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else positive(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
