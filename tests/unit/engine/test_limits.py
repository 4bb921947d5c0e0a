from types import SimpleNamespace

import pytest

from actors.verifier.limits import EngineLimits
from specconfig.engine import EngineConfig
from tests.unit.engine import fakes


def test_from_config_reads_the_forwarding_properties():
    config = SimpleNamespace(
        scheduler=SimpleNamespace(
            max_num_seqs=3,
            max_num_batched_tokens=64,
            enable_chunked_prefill=False,
            max_num_queued_requests=9,
        ),
        cache=SimpleNamespace(block_size=8, enable_prefix_caching=False),
        runtime=SimpleNamespace(max_logprobs=5),
        model=SimpleNamespace(vocab_size=77, eos_token_ids=[1, 2]),
        max_model_len=128,
        num_speculative_tokens=4,
        num_lookahead_tokens=6,
        max_num_new_slots_for_drafting=1,
        draft_has_own_kv=True,
        num_speculative_tokens_for_batch=lambda n: n + 1,
    )
    limits = EngineLimits.from_config(config, 40)
    assert limits == EngineLimits(
        3, 64, 128, 8, 40, 77, (1, 2), False, False, 9, 5, 4, 6, 1, True,
        config.num_speculative_tokens_for_batch,
    )  # fmt: skip
    assert limits.num_speculative_tokens_for_batch(2) == 3


def test_the_configuration_has_what_the_verifier_reads():
    for name in (
        "max_model_len",
        "num_speculative_tokens",
        "num_lookahead_tokens",
        "max_num_new_slots_for_drafting",
        "draft_has_own_kv",
        "num_speculative_tokens_for_batch",
    ):
        assert hasattr(EngineConfig, name)
    assert {"scheduler", "cache", "runtime", "model"} <= set(EngineConfig.model_fields)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_blocks": 32}, "num_blocks=32 holds 124 tokens.*max_model_len=128"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens=7.*max_num_seqs=8"),
    ],
)
def test_limits_that_would_deadlock_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        fakes.make_limits(2, **changes)
