"""What the comparison says of figures, and that a peer's fault is only its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import environments, machine, run
from benchmarks.peers.cases import Case, make_cases, token_ids
from benchmarks.peers.contestants import CONTESTANTS, Ask, Contestant, Setup, vllm_tuning
from benchmarks.peers.processes import PeerError, WorkerProcess
from benchmarks.peers.report import BEST, PAIRS, markdown, ratios


def figures(speed: float, **more: Any) -> dict[str, Any]:
    first = {"time_to_first_token_ms": {"p50": 80.0}}
    return {
        "output_tokens_per_s": speed, "num_completed": 3, "num_failed": 0, "num_cut": 0,
        "errors": {}, **first, **more,
    }  # fmt: skip


def measured(
    system: str, mode: str, round_number: int, speed: float, **more: Any
) -> dict[str, Any]:
    about = {"system": system, "mode": mode, "round": round_number, "case": "chat-1"}
    return {**about, "figures": figures(speed, **more)}


def test_ratios_are_taken_within_rounds() -> None:
    rows = [
        measured("paceline", "plain", 0, 20.0),
        measured("vllm", "plain", 0, 10.0),
        # The machine was slow in round 1, for both.
        measured("vllm", "plain", 1, 4.0),
        measured("paceline", "plain", 1, 12.0),
        # A run with a failed request is no measurement, and a side without its other is none.
        measured("vllm", "plain", 2, 99.0, num_failed=1),
        measured("paceline", "plain", 2, 20.0),
        measured("vllm", "ngram", 1, 6.0),
        {"system": "openvino", "mode": "plain", "case": None, "round": 0, "error": "no start"},
    ]
    found = {(r["ours"], r["peer"]): r["tokens_per_s"] for r in ratios(rows)}
    assert found == {
        ("paceline plain", "vllm plain"): {"median": 2.5, "min": 2.0, "max": 3.0, "rounds": 2},
        # Its n-gram mode was the better one of round 1.
        ("paceline best", "vllm best"): {"median": 2.0, "min": 2.0, "max": 2.0, "rounds": 2},
    }


def test_what_is_compared_is_what_is_run() -> None:
    sides = {(c.system, mode) for c in CONTESTANTS for mode in c.modes}
    assert {side for pair in PAIRS for side in pair} == sides
    assert {system for pair in BEST for system in pair} <= {system for system, _ in sides}


def test_cases_are_prompts_by_clients_and_a_files_categories(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    lines = [{"prompt": "a", "category": "x"}, {"prompt": "b", "category": "y"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    made = make_cases(["chat", str(file)], [1, 4], 1, None)
    assert [c.name for c in made] == ["chat-1", "chat-4", "x-1", "x-4", "y-1", "y-4"]
    assert [c.num_requests for c in made[:2]] == [2, 4]
    assert [c.name for c in make_cases(["chat"], [1, 4], 1, ["chat-4"])] == ["chat-4"]
    with pytest.raises(ValueError, match="no case chat-2; there are chat-1"):
        make_cases(["chat"], [1], 1, ["chat-2"])

    class Tokenizer:
        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
            return [ord(messages[0]["content"])]

    assert token_ids(Tokenizer(), Case("x-1", made[2].prompts, 1, 3)) == [[97]] * 3


SETUP = Setup(Path("m"), None, Path(), 8, 4, 64, 5.0, {})


def contestant(system: str, modes: tuple[str, ...], log: list[str], fault: str = "") -> Contestant:
    @contextlib.contextmanager
    def start(setup: Setup) -> Iterator[Ask]:
        def ask(mode: str, case: Case) -> dict[str, Any]:
            log.append(f"{system} {mode} {case.name}")
            if fault:
                raise PeerError(fault)
            return figures(10.0)

        log.append(f"start {system}")
        yield ask
        log.append(f"end {system}")

    return Contestant(system, modes, start, 1 if system == "library" else None)


def test_rounds_go_forth_and_back_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_bandwidth", lambda: 10.0)
    log: list[str] = []
    both = [contestant("server", ("a", "b"), log), contestant("library", ("c",), log)]
    cases = make_cases(["chat"], [1, 4], 1, None)
    made = run.compare(SETUP, both, cases, 2)
    assert made["read_gb_per_s"] == [10.0, 10.0]
    assert log == [
        "start server", "server a chat-1", "server b chat-1", "server b chat-4", "server a chat-4",
        "end server", "start library", "library c chat-1", "end library",
        "start library", "library c chat-1", "end library",
        "start server", "server b chat-1", "server a chat-1", "server a chat-4", "server b chat-4",
        "end server",
    ]  # fmt: skip


def test_one_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_bandwidth", lambda: 10.0)
    log: list[str] = []
    both = [contestant("x", ("plain",), log, "it broke"), contestant("y", ("plain",), log)]
    made = run.compare(SETUP, both, make_cases(["chat"], [1], 1, None), 1)
    assert [m.get("error") for m in made["measurements"]] == ["it broke", None]
    page = markdown({
        **made, "machine": machine.describe(), "weights_read_ms": {"m": 16.2},
        "settings": {"max_tokens": 4, "seats": 8, "rounds": 1},
        "ratios": ratios(made["measurements"]),
    })  # fmt: skip
    assert "| chat-1 | 10.0 |" in page and "- x plain chat-1, round 0: it broke" in page
    assert "m 16.2 ms" in page and "Load average before a start: " in page


WORKER = """
import json, sys
print("loading", file=sys.stderr)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if job["mode"] == "end": sys.exit("no memory")
    result = {"error": "bad job"} if job["mode"] == "bad" else {"echo": job["prompts"]}
    print(json.dumps(result), flush=True)
"""


def test_a_librarys_process_is_asked_over_pipes(tmp_path: Path) -> None:
    process = WorkerProcess([sys.executable, "-c", WORKER], {}, tmp_path / "lib.log")
    try:
        assert process.result(30) == {"ready": True}
        assert process.run({"mode": "plain", "prompts": [[1]]}, 30) == {"echo": [[1]]}
        with pytest.raises(PeerError, match="bad job"):
            process.run({"mode": "bad"}, 30)
        with pytest.raises(PeerError, match=r"process ended; lib.log ends: no memory"):
            process.run({"mode": "end"}, 30)
    finally:
        process.end()
    assert not process.is_alive()


def test_a_missing_environment_is_named_with_what_makes_it(tmp_path: Path, capsys) -> None:
    arguments = ["--out", str(tmp_path / "o.json"), "--only", "vllm", "--envs", str(tmp_path)]
    assert run.main([*arguments, "--model", str(tmp_path)]) == 1
    assert "--make-envs makes it" in capsys.readouterr().err
    assert run.main(["--out", str(tmp_path / "no" / "o.json")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert run.main(["--out", "o", "--only", "vllm,else"]) == 1
    assert "no system else; there are paceline, vllm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--clients", "1,a", "'a' is no number from 1 on"),
        ("--rounds", "0", "'0' is no number from 1 on"),
        ("--max-seconds", "-1", "'-1' is no number above 0"),
        ("--vllm-env", "LD_PRELOAD", "'LD_PRELOAD' is not NAME=VALUE"),
    ],
)
def test_a_wrong_value_is_named_with_its_option(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run.main(["--out", "o.json", f"{option}={value}"])
    assert f"argument {option}: {said}" in capsys.readouterr().err


def test_an_environment_is_made_once_and_again_where_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    failing = True

    def pip(command: list[str], **_: Any) -> None:
        commands.append(list(map(str, command)))
        if failing:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(environments.venv, "create", lambda folder, **_: folder.mkdir(exist_ok=1))
    monkeypatch.setattr(environments.subprocess, "run", pip)
    folder = tmp_path / "openvino"
    with pytest.raises(subprocess.CalledProcessError):
        environments.ensure_openvino(folder, print)
    failing = False
    for _ in range(2):
        assert environments.ensure_openvino(folder, print) == folder / "bin" / "python"
    assert len(commands) == 2 and commands[0] == commands[1]
    assert commands[0][-1].startswith("openvino-genai==")


def test_vllm_gets_all_cores_and_the_libraries_that_its_environment_has(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    tuning = vllm_tuning(tmp_path / "bin" / "python")
    assert str(tmp_path / "lib" / "libiomp5.so") in tuning["LD_PRELOAD"].split(":")
    assert len(tuning["VLLM_CPU_OMP_THREADS_BIND"].split(",")) == machine.describe()["cores"]
