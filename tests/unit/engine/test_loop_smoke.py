"""One request through the whole engine, in process."""

import pytest

from actors.steps.client import InProcessStepClient
from actors.verifier.engine import VerifierEngine
from tests.unit.engine import fakes


@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.parametrize("guess", [fakes.perfect, fakes.wrong, fakes.mixed])
def test_lookup_output_is_that_of_plain_decoding(k, guess):
    script = fakes.whole()
    limits = fakes.make_limits(k)
    client = InProcessStepClient(fakes.ScriptedTarget(limits, script))
    engine = VerifierEngine(limits, client, drafter=fakes.FakeLookup(guess(script)))
    try:
        (got,) = fakes.run_all(engine, [fakes.request("a", [1, 2, 3, 4, 5], max_tokens=40)])
        assert got.token_ids == fakes.plain(script, [1, 2, 3, 4, 5], 40)
        assert got.last.finish_reason == "length"
        got.check()
    finally:
        engine.stop()
    assert engine.status().error is None


@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.parametrize("guess", [fakes.perfect, fakes.wrong, fakes.mixed])
@pytest.mark.parametrize("short_every", [0, 2])
def test_draft_model_output_is_that_of_plain_decoding(k, guess, short_every):
    script = fakes.whole()
    limits = fakes.make_limits(k, has_draft_model=True)
    target = fakes.ScriptedTarget(limits, script)
    host = fakes.FakeDraftHost(limits, guess(script), short_every)
    engine = VerifierEngine(limits, InProcessStepClient(target, host))
    try:
        prompts = [[1, 2, 3, 4, 5], [7] * 30, [9]]
        got = fakes.run_all(
            engine, [fakes.request(str(i), p, max_tokens=40) for i, p in enumerate(prompts)]
        )
        for prompt, out in zip(prompts, got, strict=True):
            assert out.token_ids == fakes.plain(script, prompt, 40)
            out.check()
    finally:
        engine.stop()
    assert engine.status().error is None and engine.status().draft_lost is None
