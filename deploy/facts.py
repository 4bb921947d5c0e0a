"""What the HTTP surface must know of the engine it fronts."""

from __future__ import annotations

from dataclasses import dataclass

from specconfig.engine import EngineConfig


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts of one served model, for validating requests before they reach an engine."""

    name: str
    tokenizer: str
    tokenizer_revision: str | None
    max_model_len: int
    vocab_size: int
    num_speculative_tokens: int
    max_logprobs: int
    seed: int | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> ServedModel:
        return cls(
            name=config.runtime.served_model_name,
            tokenizer=config.model.tokenizer,
            tokenizer_revision=config.model.tokenizer_revision,
            max_model_len=config.max_model_len,
            vocab_size=config.model.vocab_size,
            num_speculative_tokens=config.num_speculative_tokens,
            max_logprobs=config.runtime.max_logprobs,
            seed=config.runtime.seed,
        )
