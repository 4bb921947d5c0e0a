import pytest

from actors.verifier.limits import EngineLimits
from specconfig.draft_law import DraftLaw
from specconfig.engine_args import EngineArgs
from tests.tiny import CONSTANT_K, write_tiny_config
from tests.unit.engine import fakes


def test_limits_are_those_of_the_configuration(tmp_path):
    model = str(write_tiny_config(tmp_path / "m"))
    speculation = {"method": "ngram", "num_speculative_tokens": 4}
    args = EngineArgs(model=model, max_num_seqs=3, block_size=8, speculative_config=speculation)
    config = args.resolve()
    limits = EngineLimits.from_config(config, 400)
    assert (limits.max_num_seqs, limits.block_size, limits.num_blocks) == (3, 8, 400)
    assert limits.law == config.draft_law == DraftLaw()
    assert (
        limits.follows_goodput
        and not EngineLimits.from_config(
            args.model_copy(update={"speculative_config": {**speculation, **CONSTANT_K}}).resolve(),
            400,
        ).follows_goodput
    )
    assert limits.num_speculative_tokens_for_batch(2) == limits.num_speculative_tokens == 4


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
