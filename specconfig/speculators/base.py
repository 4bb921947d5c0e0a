"""``SpeculatorConfig``: the capabilities of a drafter, read by every other part of the engine.

The defaults describe a drafter with no checkpoint and no special needs. A custom method subclasses
this class, or the class of the built-in method it resembles, and overrides what differs.

Static needs are class variables; values that depend on settings are properties. During resolution
the hooks (``default_model``, ``configure``, ``specialize``) fill a ``Resolution``; afterwards an
instance is a read-only view of the resolved settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol

from specconfig.errors import ConfigError
from specconfig.model import ModelConfig
from specconfig.speculators.resolution import Resolution

Host = Literal["verifier", "target", "draft"]

METHOD_OPTIONS = (
    "dspark_draft_topk", "draft_lm_head_quantization", "index_share_for_mtp_iteration",
    "xpress_topc", "speculator_options",
)  # fmt: skip
"""Fields that only some methods read; set for any other method they are an error."""


class ResolvedSettings(Protocol):
    """The resolved settings that capabilities depend on; a ``SpeculativeConfig`` has them."""

    @property
    def num_speculative_tokens(self) -> int:
        """K."""

    @property
    def draft_model_config(self) -> ModelConfig | None:
        """The draft; the target itself for lookup drafters."""

    @property
    def speculator_options(self) -> dict[str, Any] | None:
        """Free options of a registered method."""


class SpeculatorConfig:
    """Capabilities of one drafting method."""

    base_method: ClassVar[str | None] = None
    """Built-in method this class implements or builds on; None for a method of its own."""
    variant: ClassVar[str] = "custom"
    """Name of this row in the capability table."""
    implementation: ClassVar[str | None] = None
    """Qualified name ``module:Class`` of the drafter; imported by the engine, never here."""
    host: ClassVar[Host] = "verifier"
    """Process that runs the drafter: lookup on the verifier, hidden-state readers on the target."""
    supported_options: ClassVar[frozenset[str]] = frozenset()
    own_options: ClassVar[frozenset[str]] = frozenset()
    """Further fields that only this kind of drafter reads; elsewhere they draw a warning."""

    uses_target_hidden_states: ClassVar[bool] = False
    uses_aux_hidden_states: ClassVar[bool] = False
    """Needs intermediate layers of the target, not only the last hidden state."""
    proposes_draft_tokens: ClassVar[bool] = True
    produces_draft_probabilities: ClassVar[bool] = False
    """Can keep q for ratio-test verification (`draft_sample_method: probabilistic`)."""
    supports_parallel_drafting: ClassVar[bool] = False
    supports_adaptive_verification: ClassVar[bool] = False
    adaptive_verification_uses_draft_logits: ClassVar[bool] = True
    draft_has_own_vocab: ClassVar[bool] = False
    kv_survives_drafting: ClassVar[bool] = False
    """Draft KV written while drafting is right wherever its drafts are accepted."""
    needs_eagle_block_drop: ClassVar[bool] = False
    """Draft KV at a position depends on the next token, so a prefix hit's tail is unstable."""
    prefers_whole_prompts: ClassVar[bool] = False
    """Loses data when a prompt is split over steps."""
    loads_draft_checkpoint: ClassVar[bool] = False
    may_share_target_positions: ClassVar[bool] = False
    """Position table may be grown to the target's length (if the RoPE type allows it)."""

    def __init__(self, spec: ResolvedSettings) -> None:
        self.spec = spec

    # Hooks used while resolving ------------------------------------------------------------

    @classmethod
    def matches(cls, path: str, hf: Mapping[str, Any]) -> bool:
        """Whether a draft checkpoint is of this method; ``path`` is lower case."""
        return False

    @classmethod
    def default_model(cls, res: Resolution) -> str | None:
        """Weights to use when the user named none; None for methods without weights."""
        return None

    @classmethod
    def configure(cls, res: Resolution) -> None:
        """Fill defaults and, for checkpoint drafters, build the draft ModelConfig."""
        res.reset_lookup()

    @classmethod
    def specialize(cls, res: Resolution) -> type[SpeculatorConfig]:
        """Class to use for these settings; a subclass of this one."""
        return cls

    @classmethod
    def check(cls, res: Resolution) -> None:
        """Rules of this method alone; rules over several methods live in ``checks``."""

    @classmethod
    def missing_tokens(cls, res: Resolution) -> ConfigError:
        """Error for a K that neither the user nor the checkpoint gave."""
        model = res.values.get("model")
        gist = (
            f"num_speculative_tokens must be provided: draft model {model!r} was given, K was not"
            if model and cls.loads_draft_checkpoint
            else "num_speculative_tokens must be provided, unless the draft checkpoint declares it"
        )
        return ConfigError(
            "speculative_config.num_speculative_tokens", None, "a positive integer",
            "set num_speculative_tokens, for example 3", message=gist,
        )  # fmt: skip

    # Values that depend on settings --------------------------------------------------------

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots a request needs past its scheduled tokens."""
        return 0

    @property
    def num_prefill_lookahead_tokens(self) -> int:
        """Tokens past a prompt chunk that the drafter reads."""
        return 1 if self.uses_target_hidden_states else 0

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """Input rows per request that the drafter adds to the one it has."""
        return 0

    @property
    def num_draft_kv_layers(self) -> int:
        """Layers of draft KV kept per token; 0 when the drafter keeps none."""
        return 0

    @property
    def keeps_kv(self) -> bool:
        """Whether KV blocks hold something of this drafter for every position."""
        return self.num_draft_kv_layers > 0

    @property
    def caps_active_requests(self) -> bool:
        """Whether each active request needs a whole query block in the drafter's batch."""
        return False

    @property
    def taps_aux_layers(self) -> bool:
        """Whether this checkpoint really reads intermediate layers."""
        return self.uses_aux_hidden_states
