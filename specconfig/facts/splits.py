"""Whether a model splits evenly over its ranks."""

from __future__ import annotations

from specconfig.errors import ConfigError
from specconfig.facts.model_facts import expert_counts
from specconfig.model import ModelConfig, ParallelConfig


def check_experts(model: ModelConfig, parallel: ParallelConfig, role: str) -> None:
    """Whole experts must split evenly over the ranks that they are spread over."""
    ranks = parallel.num_expert_ranks
    for count in expert_counts(model.hf_config):
        if count % ranks:
            raise ConfigError(
                "enable_expert_parallel",
                True,
                f"for a number of ranks that divides the experts: {role} model {model.model!r} has "
                f"{count} experts, and tensor parallel size x data parallel size is {ranks}",
                f"make that product one of {[n for n in range(1, count + 1) if count % n == 0]}, "
                "or remove enable_expert_parallel",
            )


def check_heads(model: ModelConfig, degree: int, field: str, role: str) -> None:
    """Attention heads must split evenly over the ranks."""
    heads = model.num_attention_heads
    if heads % degree:
        raise ConfigError(
            field,
            degree,
            f"a divisor of the {role} model's {heads} attention heads",
            f"use one of {[d for d in range(1, heads + 1) if heads % d == 0]}",
            message=f"{role} model {model.model!r}: {heads} attention heads must be divisible by "
            f"tensor parallel size {degree}",
        )
