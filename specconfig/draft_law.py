"""``DraftLaw``: what a drafter asks of scheduler, commit path and prefix index, as data.

Resolved once from a method's capabilities and carried to the verifier. Whoever schedules or commits
reads this value and nothing else of the method, so a new method is a new value, not a new branch.
"""

from __future__ import annotations

from pydantic import Field

from specconfig.model import Frozen


class DraftLaw(Frozen):
    """How drafts arrive and when the drafter's KV is whole.

    An *entry* is what the drafter keeps for one position p: KV of its layers, or states. L is the
    position of the newest known token; the target has no KV and no hidden state there.

    Three rules follow, for a request with n known tokens (n = L + 1):

    * An entry can be made for p < ``feed_end(n)``: n, or n - 1 where it needs the target's state.
    * It is final, and may be kept and published, for p < n - ``num_next_tokens``.
    * What drafting itself wrote is final only if ``kv_survives_drafting``, and then for the drafts
      that the target accepted.
    """

    proposes: bool = Field(default=True, description="Whether it ever gives a draft.")
    arrives_in_step: bool = Field(
        default=False, description="Drafts come during the step; else they are in the plan."
    )
    reads_target_states: bool = Field(
        default=False, description="An entry is made from the target's hidden state at p."
    )
    keeps_kv: bool = Field(
        default=False, description="Entries are kept, in the KV blocks of the target."
    )
    num_next_tokens: int = Field(
        default=0, ge=0, description="Tokens after p that the entry at p depends on."
    )
    kv_survives_drafting: bool = Field(
        default=False, description="Entries written while drafting stay when drafts are accepted."
    )
    num_hash_lookahead_tokens: int = Field(
        default=0, ge=0, description="Tokens past a block that its prefix hash covers."
    )
    drops_tail_block: bool = Field(
        default=False, description="The last block of a prefix hit is recomputed."
    )
    num_lookahead_tokens: int = Field(
        default=0, ge=0, description="KV slots that drafting may write, from position L on."
    )
    num_extra_rows: int = Field(
        default=0, ge=0, description="Rows per drafting request in the drafter's own forward."
    )
    max_num_active_seqs: int | None = Field(
        default=None, ge=1, description="Requests that the drafter can serve at once."
    )

    def feed_end(self, num_tokens: int) -> int:
        """Positions below this can get an entry once ``num_tokens`` tokens are known."""
        return max(num_tokens - 1, 0) if self.reads_target_states else num_tokens

    def final_end(self, num_tokens: int) -> int:
        """Entries below this cannot change any more once ``num_tokens`` tokens are known."""
        return max(num_tokens - self.num_next_tokens, 0)
