"""A library that generates in its own process, driven over pipes.

    python worker.py transformers|openvino|paceline MODEL SEATS

Runs in the library's own environment, so it imports nothing of ours at the top. A line of JSON on
stdin is a job, a line on stdout its result; the first line says that the library is loaded. All
that libraries print goes to stderr. Times are `time.perf_counter` of this process.

    job     {"mode": "plain", "prompts": [[ids], ...], "max_tokens": 64, "clients": 1}
    result  {"started": s, "ended": s, "cpu_s": s, "answers": [{"due", "first", "last", "tokens"}]}
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]
NUM_DRAFTS = 4
NGRAM_MAX = 4


class Transformers:
    """`generate` of transformers, plain and with prompt lookup; one request at a time."""

    def __init__(self, model: str, seats: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def run(self, mode: str, prompts: list[list[int]], max_tokens: int, _: int) -> list[Answer]:
        lookup = {"prompt_lookup_num_tokens": NUM_DRAFTS, "max_matching_ngram_size": NGRAM_MAX}
        extra = lookup if mode == "lookup" else {}
        return [self._one(ids, max_tokens, extra) for ids in prompts]

    def _one(self, ids: list[int], max_tokens: int, extra: dict[str, Any]) -> Answer:
        tensor = self._torch.tensor([ids])
        clock = _FirstToken()
        due = time.perf_counter()
        with self._torch.inference_mode():
            out = self._model.generate(
                tensor, attention_mask=self._torch.ones_like(tensor), max_new_tokens=max_tokens,
                min_new_tokens=max_tokens, do_sample=False, streamer=clock, **extra,
            )  # fmt: skip
        ended = time.perf_counter()
        tokens = int(out.shape[1]) - len(ids)
        return {"due": due, "first": clock.first_at, "last": ended, "tokens": tokens}


class _FirstToken:
    """A streamer: it is given the prompt, then tokens as they are made."""

    def __init__(self) -> None:
        self.first_at: float | None = None
        self._has_prompt = False

    def put(self, _: Any) -> None:
        if self._has_prompt and self.first_at is None:
            self.first_at = time.perf_counter()
        self._has_prompt = True

    def end(self) -> None:
        """Nothing is kept."""


class OpenVino:
    """OpenVINO GenAI on the CPU; a pipeline for each mode, the last one kept."""

    def __init__(self, model: str, seats: int) -> None:
        import openvino_genai

        self._genai = openvino_genai
        self._model = model
        self._mode: str | None = None
        self._pipeline: Any = None
        self._load("plain")

    def _load(self, mode: str) -> None:
        if mode != self._mode:
            self._pipeline = None
            # Its own default but for two: prompts of a run would come from its cache the second
            # time, and a scheduler that is given has small prompt chunks.
            scheduler = self._genai.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            scheduler.max_num_batched_tokens = 2**20
            extra = {"prompt_lookup": True} if mode == "lookup" else {}
            self._pipeline = self._genai.LLMPipeline(
                self._model, "CPU", scheduler_config=scheduler, **extra
            )
            self._mode = mode

    def run(self, mode: str, prompts: list[list[int]], max_tokens: int, _: int) -> list[Answer]:
        self._load(mode)
        config = self._genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        if mode == "lookup":
            config.num_assistant_tokens = NUM_DRAFTS
            config.max_ngram_size = NGRAM_MAX
        return [self._one(ids, config) for ids in prompts]

    def _one(self, ids: list[int], config: Any) -> Answer:
        import numpy
        import openvino

        array = numpy.array([ids], numpy.int64)
        inputs = self._genai.TokenizedInputs(
            openvino.Tensor(array), openvino.Tensor(numpy.ones_like(array))
        )
        due = time.perf_counter()
        result = self._pipeline.generate(inputs, config)
        ended = time.perf_counter()
        first = due + result.perf_metrics.get_ttft().mean / 1e3
        return {"due": due, "first": first, "last": ended, "tokens": len(result.tokens[0])}


class Paceline:
    """Our own engine without Ray, HTTP and processes: what serving costs on top of it."""

    def __init__(self, model: str, seats: int) -> None:
        from actors.startup.in_process import build_in_process
        from specconfig import EngineArgs

        ngram = {
            "method": "ngram", "num_speculative_tokens": NUM_DRAFTS,
            "prompt_lookup_min": 2, "prompt_lookup_max": NGRAM_MAX,
        }  # fmt: skip
        args: dict[str, Any] = {"model": model, "max_model_len": 2048, "max_num_seqs": seats}
        args |= {"dtype": "float32", "device": "cpu", "speculative_config": ngram}
        args |= {"enable_prefix_caching": False}  # as for all the others
        self._engine = build_in_process(EngineArgs(**args).resolve())

    def run(
        self, mode: str, prompts: list[list[int]], max_tokens: int, clients: int
    ) -> list[Answer]:
        return asyncio.run(self._run(mode == "ngram", prompts, max_tokens, clients))

    async def _run(
        self, speculates: bool, prompts: list[list[int]], max_tokens: int, clients: int
    ) -> list[Answer]:
        answers: list[Answer] = []
        waiting = iter(prompts)

        async def client() -> None:
            for ids in waiting:
                answers.append(await self._one(ids, max_tokens, speculates))

        await asyncio.gather(*(client() for _ in range(clients)))
        return answers

    async def _one(self, ids: list[int], max_tokens: int, speculates: bool) -> Answer:
        from actors.requests import GenerateRequest

        due, first, tokens = time.perf_counter(), None, 0
        request = GenerateRequest(
            request_id=f"peers-{time.perf_counter_ns()}", prompt_token_ids=ids,
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True,
            speculation_enabled=speculates,
        )  # fmt: skip
        async for out in self._engine.generate(request):
            if out.token_ids:
                first = first or time.perf_counter()
                tokens += len(out.token_ids)
        return {"due": due, "first": first, "last": time.perf_counter(), "tokens": tokens}


KINDS: dict[str, Callable[[str, int], Any]] = {
    "transformers": Transformers,
    "openvino": OpenVino,
    "paceline": Paceline,
}


def main() -> None:
    """Load, then run jobs until stdin ends."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(result: dict[str, Any]) -> None:
        results.write(json.dumps(result) + "\n")
        results.flush()

    library = KINDS[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
    say({"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        cpu, started = time.process_time(), time.perf_counter()
        try:
            answers = library.run(job["mode"], job["prompts"], job["max_tokens"], job["clients"])
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            continue
        say({
            "started": started, "ended": time.perf_counter(),
            "cpu_s": time.process_time() - cpu, "answers": answers,
        })  # fmt: skip
    os._exit(0)  # threads of the library are not asked


if __name__ == "__main__":
    main()
