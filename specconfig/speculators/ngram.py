"""Prompt lookup: match the sequence's own suffix inside the sequence."""

from __future__ import annotations

from specconfig.errors import ConfigError
from specconfig.speculators.base import SpeculatorConfig
from specconfig.speculators.resolution import Resolution

DEFAULT_WINDOW = 5


class NgramSpeculatorConfig(SpeculatorConfig):
    """n-gram lookup on the verifier's CPU; drafts are one-hot and need no weights."""

    base_method = "ngram"
    variant = "ngram"
    implementation = "actors.draft.drafters.ngram:NgramDrafter"
    host = "verifier"
    own_options = frozenset({"prompt_lookup_max", "prompt_lookup_min"})

    @classmethod
    def configure(cls, res: Resolution) -> None:
        """Complete the lookup window: both missing -> 5/5, one missing -> the other."""
        low, high = res.values["prompt_lookup_min"], res.values["prompt_lookup_max"]
        if low is None and high is None:
            low = high = DEFAULT_WINDOW
            res.log.note("speculative_config.prompt_lookup_max", high, "default", "n-gram window")
            res.log.note("speculative_config.prompt_lookup_min", low, "default", "n-gram window")
        elif low is None or high is None:
            known = low if low is not None else high
            which = "min" if low is None else "max"
            res.log.note(
                f"speculative_config.prompt_lookup_{which}",
                known,
                "inferred",
                "copied from the other end of the window",
            )
            low = high = known
        if low > high:
            raise ConfigError(
                "speculative_config.prompt_lookup_min",
                low,
                f"at most prompt_lookup_max={high}",
                f"set it to {high} or raise prompt_lookup_max",
                message=f"prompt_lookup_min={low} is larger than prompt_lookup_max={high}",
            )
        res.values["prompt_lookup_min"], res.values["prompt_lookup_max"] = low, high
        res.use_target_as_draft()


class NgramGPUSpeculatorConfig(NgramSpeculatorConfig):
    """The same lookup under vLLM's device-side name; it runs on the verifier here."""

    base_method = "ngram_gpu"
    variant = "ngram_gpu"

    @classmethod
    def configure(cls, res: Resolution) -> None:
        """As ngram, and say where it runs."""
        super().configure(res)
        res.log.note(
            "speculative_config.drafter_host",
            "verifier",
            "fallback",
            "ngram_gpu proposes exactly what ngram does; the lookup runs beside the scheduler",
        )
