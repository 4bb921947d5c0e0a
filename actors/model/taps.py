"""States of the target's forward that a drafter reads.

Aux id i is the residual stream that enters layer i; id n, of n layers, is the stream that enters
the final norm. They are taken where a layer is called, so chunks, prefix hits, compiled layers and
ranks change nothing: each state belongs to one row, and every rank has it whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from actors.errors import LoadError
from actors.model.inputs import FlatBatch, Span
from specconfig.engine import EngineConfig


@dataclass(frozen=True)
class TapSpec:
    """Which states are kept: the `last` one, behind the final norm, and streams by `aux` id."""

    last: bool = False
    aux: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: EngineConfig) -> TapSpec:
        """What the configured drafter reads of the target."""
        return cls(config.uses_last_hidden_state, config.aux_hidden_state_layer_ids or ())

    def __bool__(self) -> bool:
        return self.last or bool(self.aux)


@dataclass(frozen=True)
class Taps:
    """States of one forward's rows, without padding, in the model's dtype and on its device.

    `last` [T, H]: what the output head reads, None where not asked for. `aux` by id: [T, H].
    `spans` by slot: which rows are whose.
    """

    last: Tensor | None
    aux: dict[int, Tensor] = field(default_factory=dict)
    spans: dict[int, Span] = field(default_factory=dict)


class TapHooks:
    """Keeps what `spec` asks for while a forward runs. Without taps nothing is installed.

    Args:
        decoder: What holds the layers; its output is the last state.
        layers: In order.

    Raises:
        LoadError: an aux id outside 0..number of layers.
    """

    def __init__(self, spec: TapSpec, decoder: nn.Module, layers: Sequence[nn.Module]) -> None:
        self.spec = spec
        self._last: Tensor | None = None
        self._aux: dict[int, Tensor] = {}
        outside = [i for i in spec.aux if not 0 <= i <= len(layers)]
        if outside:
            raise LoadError(
                f"aux_hidden_state_layer_ids={list(spec.aux)}: {outside} are not among 0 to "
                f"{len(layers)}, the layers of the target and the end of the last"
            )
        for i in spec.aux:
            # Hooks of the module, not of its forward, which compiled layers replace.
            if i < len(layers):
                layers[i].register_forward_pre_hook(self._entering(i), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(self._leaving(i))
        if spec.last:
            decoder.register_forward_hook(self._ending)

    def take(self, batch: FlatBatch) -> Taps | None:
        """The states of the forward over `batch` that just ran; nothing of it stays here."""
        if not self.spec:
            return None
        last, aux, num_rows = self._last, self._aux, batch.num_rows
        self.forget()
        return Taps(
            None if last is None else last[0, :num_rows],
            {i: aux[i][0, :num_rows] for i in self.spec.aux},
            batch.spans,
        )

    def forget(self) -> None:
        self._last, self._aux = None, {}

    def _entering(self, i: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._aux[i] = args[0] if args else kwargs["hidden_states"]

        return hook

    def _leaving(self, i: int) -> Any:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            self._aux[i] = output[0] if isinstance(output, tuple) else output

        return hook

    def _ending(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._last = output.last_hidden_state
