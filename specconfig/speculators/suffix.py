"""Suffix decoding: lookup in suffix trees of this and of finished requests."""

from __future__ import annotations

from specconfig.speculators.base import SpeculatorConfig
from specconfig.speculators.resolution import Resolution


class SuffixSpeculatorConfig(SpeculatorConfig):
    """Suffix-tree lookup on the verifier's CPU; draft length adapts to the match."""

    base_method = "suffix"
    variant = "suffix"
    implementation = "actors.draft.drafters.suffix:SuffixDrafter"
    host = "verifier"
    own_options = frozenset(
        {
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        }
    )

    @classmethod
    def configure(cls, res: Resolution) -> None:
        """Default K is the tree depth: the drafter itself decides how much of it to use."""
        if res.values["num_speculative_tokens"] is None:
            depth = res.values["suffix_decoding_max_tree_depth"]
            res.values["num_speculative_tokens"] = depth
            res.log.note(
                "speculative_config.num_speculative_tokens",
                depth,
                "inferred",
                "suffix decoding: the maximum tree depth",
            )
            res.log.warn(
                f"num_speculative_tokens was not given; suffix decoding uses its maximum tree "
                f"depth {depth}"
            )
