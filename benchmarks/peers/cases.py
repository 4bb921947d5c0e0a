"""What is asked of each contestant: prompts, and how many clients ask at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.bench.prompts import BUILT_IN, BenchPrompt, read_prompts


@dataclass(frozen=True, slots=True)
class Case:
    """One workload; `name` is `chat-4`, or `writing-1` for a category of a file."""

    name: str
    prompts: tuple[BenchPrompt, ...]
    num_clients: int
    num_requests: int


def make_cases(
    prompts: Sequence[str], clients: Sequence[int], per_client: int, wanted: Sequence[str] | None
) -> list[Case]:
    """Each set of prompts with each number of clients; a file's categories are sets of their own.

    Raises:
        ValueError: A wanted name is none of them.
    """
    made: list[Case] = []
    for source in prompts:
        for name, some in _sets(source).items():
            for n in clients:
                made.append(Case(f"{name}-{n}", tuple(some), n, max(2, n * per_client)))
    if wanted is None:
        return made
    known = {case.name: case for case in made}
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"no case {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in wanted]


def _sets(source: str) -> dict[str, list[BenchPrompt]]:
    found: dict[str, list[BenchPrompt]] = {}
    for prompt in read_prompts(source):
        found.setdefault(source if source in BUILT_IN else prompt.category, []).append(prompt)
    return found


def token_ids(tokenizer: Any, case: Case) -> list[list[int]]:
    """Ids of the case's requests in turn, for libraries that are not asked over HTTP."""
    made = [
        tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, return_dict=False
        )
        for prompt in case.prompts[: case.num_requests]
    ]
    return [list(made[i % len(made)]) for i in range(case.num_requests)]


def weights_bytes(model: Path) -> int:
    """Bytes of weights that a step reads: of a directory's safetensors, or of a GGUF file."""
    if model.is_file():
        return model.stat().st_size
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))
