"""What one streamed event costs: CPU of the proxy, the ingress and the engine, from /proc.

    python -m benchmarks.stream_cost [--model DIR] [--clients 1,32] [--seconds 8] [--port 8127]

Starts `paceline serve` with a random model whose steps take milliseconds, streams completions of
one token an event, and prints milliseconds of CPU per event of every process beside the target.
The last line of output is one JSON document. Costs of a request's beginning and end are in it,
spread over its 400 events; what Ray's other processes take is shown per second, loaded and idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from tests.tiny import VOCAB_SIZE, write_tiny_model

NUM_TOKENS: Final = 400
_IDLE_S: Final = 5.0
# Steps of a few milliseconds: several events of a request must not meet on their way.
_NUM_LAYERS: Final = 12
# Role of a process by what its command line begins with, or contains.
_ROLES: Final = {
    "proxy": ("ray::ProxyActor", "haproxy"),
    "ingress": ("ray::ServeReplica:paceline:Ingress",),
    "engine": ("ray::ServeReplica:paceline:Engine",),
    "target": ("ray::TargetActor", "ray::Target"),
}


def role_of(process: psutil.Process) -> str:
    """Which part of the product a process is; what is none of it belongs to Ray."""
    command = " ".join(process.cmdline())
    for role, marks in _ROLES.items():
        if any(mark in command for mark in marks):
            return role
    return "ray"


def cpu_of(server: psutil.Process) -> dict[str, float]:
    """Seconds of CPU so far of the server's processes, by role."""
    totals: dict[str, float] = {}
    for process in [server, *server.children(recursive=True)]:
        try:
            times = process.cpu_times()
            role = role_of(process)
        except psutil.Error:
            continue
        totals[role] = totals.get(role, 0.0) + times.user + times.system
    return totals


def spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Seconds of CPU between two looks."""
    return {role: after[role] - before.get(role, 0.0) for role in sorted(after)}


@contextmanager
def serving(model: Path, port: int, clients: int) -> Iterator[psutil.Process]:
    """`paceline serve` with room for `clients` requests at once."""
    args = {
        "model": str(model), "served_model_name": "random", "device": "cpu", "dtype": "float32",
        "max_num_seqs": clients, "num_threads": 1, "compile_layers": "off",
    }  # fmt: skip
    app = {"name": "paceline", "route_prefix": "/", "import_path": "deploy.app:build", "args": args}
    config = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [app]}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        command = [sys.executable, "-m", "deploy.cli", "serve", file.name]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            said = []
            for line in server.stdout:
                said.append(line)
                if line.startswith("Ready: "):
                    break
            else:
                raise RuntimeError(f"the server did not start: {''.join(said)}")
            yield psutil.Process(server.pid)
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=120)


def write_model(folder: Path) -> Path:
    """A random model, every token of which is a word: each step makes an event."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    write_tiny_model(folder, num_layers=_NUM_LAYERS)
    words = {f"word{number} ": number for number in range(VOCAB_SIZE)}
    backend = Tokenizer(models.WordLevel(words, unk_token="word0 "))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return folder


async def stream_once(port: int, seed: int) -> int:
    """One streamed completion over a connection of its own; the number of its events."""
    body = json.dumps(
        {
            "model": "random", "prompt": "What does one event cost?", "max_tokens": NUM_TOKENS,
            "stream": True, "seed": seed, "ignore_eos": True,
        }
    )  # fmt: skip
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write((head + body).encode())
        events, tail = 0, b""
        while data := await reader.read(65536):
            tail += data
            *whole, tail = tail.split(b"\n\n")
            events += sum(b"data: {" in part for part in whole)
        return events
    finally:
        writer.close()


async def load(port: int, clients: int, seconds: float) -> int:
    """Events that `clients` clients were sent; each begins requests for `seconds`."""
    end = time.monotonic() + seconds

    async def client(number: int) -> int:
        events = 0
        while time.monotonic() < end:
            events += await stream_once(port, number)
        return events

    return sum(await asyncio.gather(*map(client, range(clients))))


def measure(
    server: psutil.Process, port: int, clients: int, seconds: float, idle: dict[str, float]
) -> dict[str, Any]:
    """Milliseconds of CPU per event while `clients` clients stream. `idle`: CPU per second that
    each role takes anyway."""
    before, began = cpu_of(server), time.monotonic()
    events = asyncio.run(load(port, clients, seconds))
    took = time.monotonic() - began
    used = spent(before, cpu_of(server))
    roles = ("proxy", "ingress", "engine")
    per_event = {role: round(1e3 * used.get(role, 0.0) / events, 3) for role in roles}
    anyway = 1e3 * sum(idle.get(role, 0.0) for role in roles) * took / events
    return {
        "clients": clients,
        "events": events,
        "events_per_s": round(events / took, 1),
        "ms_per_event": {**per_event, "all": round(sum(per_event.values()), 3)},
        "idle_ms_per_event": round(anyway, 3),  # of that
        "target_ms_per_event": round(1e3 * used.get("target", 0.0) / events, 3),
        "ray_ms_per_s": round(1e3 * used.get("ray", 0.0) / took, 1),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="instead of a random one")
    parser.add_argument("--clients", default="1,32")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--port", type=int, default=8127)
    options = parser.parse_args()
    counts = [int(part) for part in options.clients.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_model(Path(folder) / "random")
        with serving(model, options.port, max(counts)) as server:
            asyncio.run(load(options.port, 2, 1.0))  # everything is imported and connected
            before = cpu_of(server)
            time.sleep(_IDLE_S)
            rest = spent(before, cpu_of(server))
            idle = {role: seconds / _IDLE_S for role, seconds in rest.items()}
            found = [measure(server, options.port, n, options.seconds, idle) for n in counts]
    report = {
        "idle_ms_per_s": {role: round(1e3 * share, 1) for role, share in idle.items()},
        "runs": found,
    }
    for run in found:
        costs = ", ".join(f"{role} {ms:.2f}" for role, ms in run["ms_per_event"].items())
        print(
            f"{run['clients']:3d} clients, {run['events_per_s']:.0f} events/s: {costs} ms each, "
            f"{run['idle_ms_per_event']:.2f} of it spent idle too"
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
