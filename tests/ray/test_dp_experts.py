"""Two data-parallel ranks under Serve that share experts: in step, and restarted together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.ray.test_dp import complete, kill_one_rank, reports, serving_ranks
from tests.tiny import EOS_ID, VOCAB_SIZE, byte_tokenizer
from tests.unit.model.conftest import write_family
from tests.unit.parallel.test_shard import MOE

pytestmark = pytest.mark.ray


@pytest.fixture
def experts_url(tmp_path: Path) -> Iterator[str]:
    model = write_family(
        tmp_path / "tiny", "mixtral", **MOE, vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID,
        bos_token_id=256,
    )  # fmt: skip
    byte_tokenizer().save_pretrained(model)
    changes = {"enable_expert_parallel": True, "dynamic_k_dp_policy": "disable"}
    with serving_ranks(tmp_path, model, **changes) as url:
        yield url


def test_ranks_that_share_experts_stay_together_and_restart_together(experts_url: str) -> None:
    facts = httpx.get(f"{experts_url}/server_info", timeout=20).json()["data_parallel"]
    assert facts["experts"] == "spread over 2 ranks; replicas step together"
    assert facts["k"] == "static", "the table is not used with dynamic_k_dp_policy: disable"
    expected = [complete(experts_url, n) for n in range(4)]
    assert all(s["num_dp_dummy_steps"] > 0 for s in reports()), "one after the other, on both"
    kill_one_rank(experts_url, expected)
