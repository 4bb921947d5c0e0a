"""The numbers that bound a replica, read once from the resolved configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from specconfig.draft_law import DraftLaw
from specconfig.engine import EngineConfig


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the scheduler and the admission checks may count on.

    `num_blocks` includes the padding block 0. `max_num_queued_requests` counts requests beyond
    free seats; None: no limit. `num_speculative_tokens_for_batch` maps the number of requests
    scheduled in a step to K. `follows_goodput`: each request then gets as many of these as pay.
    `law`: of the drafter; without speculation any, K is 0. `seed`: base
    of the seeds of requests that bring none; None: fresh ones.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    max_num_queued_requests: int | None = None
    max_logprobs: int = 20
    num_speculative_tokens: int = 0
    num_speculative_tokens_for_batch: Callable[[int], int] = lambda _num_reqs: 0
    follows_goodput: bool = False
    law: DraftLaw = field(default_factory=DraftLaw)
    seed: int | None = None

    def __post_init__(self) -> None:
        usable = (self.num_blocks - 1) * self.block_size
        if usable < self.max_model_len:
            raise ValueError(
                f"num_blocks={self.num_blocks} holds {usable} tokens (block 0 is padding), less "
                f"than max_model_len={self.max_model_len}: a request could only preempt itself; "
                f"give the KV cache more memory or lower max_model_len"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}: not every running request would get a row"
            )

    @classmethod
    def from_config(cls, cfg: EngineConfig, num_blocks: int) -> EngineLimits:
        return cls(
            max_num_seqs=cfg.max_num_active_seqs,
            max_num_batched_tokens=cfg.scheduler.max_num_batched_tokens,
            max_model_len=cfg.max_model_len,
            block_size=cfg.cache.block_size,
            num_blocks=num_blocks,
            vocab_size=cfg.model.vocab_size,
            eos_token_ids=tuple(cfg.model.eos_token_ids),
            enable_prefix_caching=cfg.cache.enable_prefix_caching,
            enable_chunked_prefill=cfg.scheduler.enable_chunked_prefill,
            max_num_queued_requests=cfg.scheduler.max_num_queued_requests,
            max_logprobs=cfg.runtime.max_logprobs,
            num_speculative_tokens=cfg.num_speculative_tokens,
            num_speculative_tokens_for_batch=cfg.num_speculative_tokens_for_batch,
            follows_goodput=cfg.follows_goodput,
            law=cfg.draft_law or DraftLaw(),
            seed=cfg.runtime.seed,
        )
