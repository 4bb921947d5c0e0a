"""What the sampler is asked for a row of logits, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from actors.steps.messages import Int32Array, SlotParams

# Below this a temperature means greedy, in target and draft alike.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """Whose row it is, and the position of the token that it samples.

    `draft_id`: the draft token that took this position, -1 where there is none (the bonus row).
    `place`: the row's place in its request's run, 0 for the first. `step`: part of the key of
    every draw but the target's own sample; 0 where the method draws by position alone.
    `history`: tokens before `position`, drafts of the run included, where the request's
    processors read them.
    """

    params: SlotParams
    position: int
    draft_id: int = -1
    place: int = 0
    step: int = 0
    history: Int32Array | None = None

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < GREEDY_TEMPERATURE

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked of its logits but which is the largest."""
        return self.params.num_logprobs < 0 and self.is_greedy

    @property
    def is_masked(self) -> bool:
        """Whether min_tokens still forbids ending at this position."""
        output_index = self.position - self.params.prompt_len
        return output_index < self.params.min_tokens and bool(self.params.masked_ids)


# By `Stat`, one item a logits row: what `RowStats` carries.
Columns = dict[str, npt.NDArray[Any]]
