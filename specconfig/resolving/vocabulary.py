"""Whether a draft model speaks the target's token ids."""

from __future__ import annotations

from typing import Final

from specconfig.errors import ConfigError
from specconfig.facts.tokenizer_facts import Comparison, compare_tokenizers
from specconfig.model import ModelConfig
from specconfig.speculators.resolution import Resolution

_P: Final = "speculative_config"
_FEW: Final = 0.01  # share of ids that may differ: added and reserved tokens of one family


def check_same_vocab(res: Resolution) -> None:
    """Refuse a draft model whose token ids mean other tokens; settle `shared_vocab_size`."""
    draft, target = res.draft, res.require_target()
    assert draft is not None
    res.shared_vocab_size = min(draft.vocab_size, target.vocab_size)
    found = compare_tokenizers(res.facts, target, draft)
    if draft.vocab_size == target.vocab_size:
        _same_tokens(res, draft, found)
        return
    if found is not None and not found.differing:
        shared = found.num_ids
        # The sizes differ only by padding rows; ids past the tokenizer are never sampled.
        res.shared_vocab_size = min(res.shared_vocab_size, shared)
        res.log.note(
            f"{_P}.shared_vocab_size",
            res.shared_vocab_size,
            "checkpoint",
            f"equal tokenizers; vocab_size {target.vocab_size} and {draft.vocab_size} differ by "
            "padding rows only",
        )
        return
    raise ConfigError(
        f"{_P}.model",
        draft.model,
        f"a draft whose vocab_size equals the target's {target.vocab_size}",
        "use a draft of the same tokenizer family, or set use_heterogeneous_vocab: true",
        message=f"target vocab_size {target.vocab_size} and draft vocab_size {draft.vocab_size} "
        "differ",
    )


def _same_tokens(res: Resolution, draft: ModelConfig, found: Comparison | None) -> None:
    """Equal sizes are no proof: an id must mean the same token to both models."""
    field = f"{_P}.shared_vocab_size"
    if found is None:
        text = "equal sizes; the tokenizers cannot be read here and are taken for equal"
        res.log.note(field, res.shared_vocab_size, "inferred", text)
        return
    if not found.differing:
        res.log.note(field, res.shared_vocab_size, "checkpoint", "equal tokenizers")
        return
    text = (
        f"{len(found.differing)} of {found.num_ids} token ids mean something else to draft "
        f"{draft.model!r} than to the target (for example {found.examples})"
    )
    if found.share < _FEW:
        res.log.warn(f"{text}: drafts with them will be rejected")
        return
    raise ConfigError(
        f"{_P}.model",
        draft.model,
        "a draft with the target's tokenizer",
        "use a draft of the same tokenizer family",
        message=f"{text}: it would draft noise",
    )
