"""What a model's layers ask of attention, found by running one token through it.

While it runs, another function stands under the name of paged attention: it notes the shapes and
the mask of each call, refuses what is not computed here, and answers with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from actors.errors import LoadError, first_line
from actors.model import interface
from actors.model.kv import KVGeometry


class UnsupportedAttention(NotImplementedError):
    """A layer's attention needs something that is not computed here."""


# Kinds of attention whose mask the position and a window say.
_LAYER_TYPES = ("full_attention", "sliding_attention")


def discover_kv(
    model: nn.Module, layers: tuple[nn.Module, ...], location: str
) -> tuple[KVGeometry, ...]:
    """Run one token and see which layers call the attention interface, with which shapes.

    A layer that keeps other state (a recurrence, a convolution) never calls it. Its state cannot
    be rolled back by a length, so the model is refused.

    Raises:
        LoadError: names the layer and what it asks for.
    """
    device = next(model.parameters()).device
    with _recording() as found, torch.no_grad():
        ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        try:
            model(input_ids=ids, position_ids=ids, use_cache=False, slots=ids[0])
        except UnsupportedAttention as error:
            raise LoadError(f"{location}: {type(model).__name__} is not served: {error}") from error
        except Exception as error:
            raise LoadError(
                f"{location}: {type(model).__name__} does not run with a custom attention: "
                f"{first_line(error)}"
            ) from error
    calling = {id(g.module) for g in found}
    kinds = getattr(model.config, "layer_types", None) or ()
    for index, layer in enumerate(layers):
        if not any(id(module) in calling for module in layer.modules()):
            kind = f" ({kinds[index]})" if index < len(kinds) else ""
            raise LoadError(
                f"{location}: layer {index}, {type(layer).__name__}{kind}, does not keep its state "
                "in attention KV, and rejected drafts could not be rolled back; models with "
                "recurrent or convolutional layers are not served"
            )
        if index < len(kinds) and kinds[index] not in _LAYER_TYPES:
            raise LoadError(
                f"{location}: layer {index} attends as {kinds[index]!r}; served are layers of "
                f"{' and '.join(_LAYER_TYPES)}"
            )
    if len(calling) != len(found):
        raise LoadError(f"{location}: a layer attends twice per token; its KV cannot be paged")
    return tuple(found)


@contextmanager
def _recording() -> Iterator[list[KVGeometry]]:
    found: list[KVGeometry] = []

    def record(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        slots: Tensor | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        del scaling, softcap, s_aux
        _check_arguments(query, key, value, slots, others)
        window = _window(attention_mask, sliding_window)
        found.append(KVGeometry(module, key.shape[1], key.shape[3], window))
        return torch.zeros_like(query).transpose(1, 2), None

    # Only now: with a mask function registered, modeling code would build masks in each step.
    masks = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    masks[interface.ATTENTION_NAME] = _mask_of_window
    ALL_ATTENTION_FUNCTIONS.register(interface.ATTENTION_NAME, record)
    try:
        yield found
    finally:
        interface.register()
        del masks[interface.ATTENTION_NAME]


_OTHER_MASK = -1


def _mask_of_window(
    *_: Any, mask_function: Any, local_size: int | None = None, **__: Any
) -> Tensor:
    """In place of a mask, the window that it stands for: int64 [1, 1, 1, 1], 0 for none.

    What transformers' own attention computes follows the mask. The `sliding_window` that layers
    also pass says the same in most models, not in all.
    """
    window = local_size or 0
    return torch.full((1, 1, 1, 1), window if _is_window(mask_function, window) else _OTHER_MASK)


def _is_window(mask_function: Any, window: int) -> bool:
    """Whether the mask is causal with this window, as far as rows around its edges show."""
    for row in (0, 1, window, 2 * window + 3):
        for column in {0, row - window - 1, row - window, row - window + 1, row - 1, row, row + 1}:
            if column < 0:
                continue
            is_seen = bool(mask_function(*map(torch.tensor, (0, 0, row, column))))
            if is_seen != (column <= row and (not window or column > row - window)):
                return False
    return True


def _window(mask: Tensor | None, sliding_window: int | None) -> int:
    if mask is None:  # the model leaves the mask to its attention
        return sliding_window or 0
    if mask.dtype != torch.int64 or mask.numel() != 1 or int(mask) == _OTHER_MASK:
        raise UnsupportedAttention(
            "its mask is neither causal nor a sliding window, and is not computed here"
        )
    return int(mask)


# Arguments of the interface that change nothing here, whatever they are; besides `output_...`,
# which ask for results that nobody reads.
_IGNORED = frozenset({"dropout", "position_ids", "cache_position", "use_cache", "logits_to_keep"})


def _check_arguments(
    query: Tensor, key: Tensor, value: Tensor, slots: Tensor | None, others: dict[str, Any]
) -> None:
    """Refuse a layer that asks for more than is computed here: its output would be wrong.

    Raises:
        UnsupportedAttention: names what the layer asks for.
    """
    if slots is None:
        raise UnsupportedAttention("its attention does not receive what the model is called with")
    if key.shape[3] != value.shape[3] or key.shape[3] != query.shape[3]:
        raise UnsupportedAttention(
            f"keys of {key.shape[3]} and values of {value.shape[3]} dimensions (latent attention) "
            "have no paged cache"
        )
    for name, given in others.items():
        if name == "is_causal" and given is not False:
            continue
        if given is not None and name not in _IGNORED and not name.startswith("output_"):
            raise UnsupportedAttention(f"attention with {name!r} is not computed here")
