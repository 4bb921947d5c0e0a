"""States of the forward that a drafter reads; that transformers gives the same is in
`test_paged_lm`, that ranks do is in `tests/unit/parallel/test_shard`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.errors import LoadError
from actors.model.inputs import EntryRows
from actors.model.taps import TapSpec
from actors.steps.messages import token_array
from tests.unit.model.conftest import CPU, Runner
from tests.unit.model.test_paged_lm import prompt
from tests.unit.model.toy_head import ToyHead, attend_dense, expected_logits, served_logits

ALL = TapSpec(last=True, aux=(0, 1, 2, 3))


def test_states_of_several_requests_are_told_apart(family_dir: Callable[..., Path]) -> None:
    """Rows of a mixed batch, the last of them padding, by slot."""
    path, ids, other = family_dir("llama"), prompt(90), prompt(50, seed=5)
    alone = Runner(path, taps=ALL).forward((0, 0, ids)).taps
    runner = Runner(path, taps=ALL)
    runner.forward((0, 0, ids[:50]))
    taps = runner.forward((1, 0, other[:33]), (0, 50, ids[50:53])).taps
    assert alone is not None and taps is not None and alone.last is not None
    assert taps.last is not None and taps.last.shape == (36, 64)
    span = taps.spans[0]
    assert (span.start, span.first, span.count) == (50, 33, 3)
    mine = slice(span.first, span.first + span.count)
    assert torch.equal(taps.last[mine], alone.last[50:53])
    for i in ALL.aux:
        assert torch.equal(taps.aux[i][mine], alone.aux[i][50:53])


def test_nothing_is_kept_that_nobody_asked_for(family_dir: Callable[..., Path]) -> None:
    path, ids = family_dir("llama"), prompt(8)
    runner = Runner(path)
    assert runner.forward((0, 0, ids)).taps is None
    hooked = [m for m in runner.lm.model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert not hooked
    taps = Runner(path, taps=TapSpec(aux=(1,))).forward((0, 0, ids)).taps
    assert taps is not None and taps.last is None and list(taps.aux) == [1]


def test_compiled_layers_give_the_same_states(family_dir: Callable[..., Path]) -> None:
    path, ids = family_dir("llama"), prompt(60)
    eager = Runner(path, taps=ALL).forward((0, 0, ids)).taps
    compiled = Runner(path, taps=ALL, compile_layers="on")
    whole = compiled.forward((0, 0, ids)).taps
    assert compiled.lm.compiled and eager is not None and whole is not None
    compiled.forward((1, 0, ids[:40]))
    part = compiled.forward((1, 40, ids[40:45])).taps
    assert part is not None
    for i in ALL.aux:
        torch.testing.assert_close(whole.aux[i], eager.aux[i], atol=1e-4, rtol=1e-4)
        assert torch.equal(part.aux[i], whole.aux[i][40:45])


def test_an_id_past_the_last_layer_is_refused(family_dir: Callable[..., Path]) -> None:
    with pytest.raises(LoadError, match=r"aux_hidden_state_layer_ids=\[1, 4\]: \[4\] are not amo"):
        Runner(family_dir("llama"), taps=TapSpec(aux=(1, 4)))


@pytest.mark.parametrize("name", ["llama", "granite"])
def test_a_draft_shares_embedding_and_head(family_dir: Callable[..., Path], name: str) -> None:
    path, ids = family_dir(name), prompt(50)
    runner = Runner(path, taps=TapSpec(last=True))
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    whole = served_logits(runner.lm, runner.tables, 0, ids, [20, 1, 3, 25])
    expected = expected_logits(plain, ids) / getattr(plain.config, "logits_scaling", 1.0)
    torch.testing.assert_close(whole, expected, atol=2e-4, rtol=1e-4)


def test_states_can_be_handed_to_a_backward_pass(family_dir: Callable[..., Path]) -> None:
    runner, ids = Runner(family_dir("llama"), taps=ALL), prompt(20)
    batch = runner.tables.flatten([EntryRows(0, 0, token_array(ids), 0)], CPU)

    def gradients(context: AbstractContextManager[object]) -> list[torch.Tensor]:
        head, probe = ToyHead(64), torch.nn.Linear(64, 1)
        with context:
            taps = runner.lm.forward(batch).taps
            embedded = runner.lm.embed(torch.tensor(ids))
        assert taps is not None and taps.last is not None
        out = head(taps.last[:-1], embedded[1:], attend_dense)
        (out.pow(2).mean() + sum(probe(x).mean() for x in taps.aux.values())).backward()
        return [p.grad for p in (*head.parameters(), *probe.parameters()) if p.grad is not None]

    # Serving comes first: what it leaves behind must not be of inference mode.
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        gradients(torch.inference_mode())
    found = gradients(torch.no_grad())
    assert len(found) == 8 and all(bool(g.abs().sum() > 0) for g in found)
    for ours, again in zip(found, gradients(torch.enable_grad()), strict=True):
        assert torch.equal(ours, again)
