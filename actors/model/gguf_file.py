"""Load a model from a GGUF file: its linear layers and its table stay the file's blocks.

What tensors are called, and what a converter did to them, transformers knows for each architecture.
The header is read by `specconfig.facts.gguf_header`, since gguf-py builds an object for each entry
of the vocabulary, 10 s and more for 262,144 of them. Where the kernel of `linear.c` is not used
(another dtype, a GPU, no C compiler) weights are dequantised by gguf-py.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from actors.errors import LoadError, first_line
from actors.model.blocks import Bytes, format_of, pack_blocks
from actors.model.interface import ATTENTION_NAME
from actors.model.linear import PackedLinear
from actors.model.table import PackedWeight, can_look_up, look_up_in
from actors.native import products
from parallel.shard import empty_parameters
from parallel.weight_faults import faults_in_words, without_known
from specconfig.facts.gguf_header import Header, TensorPlace, read_header, without_arrays

logger = logging.getLogger(__name__)

# What llama.cpp divides the rotary embedding's frequencies by; Llama 3.1 and later have it.
_ROTARY_FACTORS = "rope_freqs.weight"


def load_gguf(location: str, path: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model of the GGUF file at `path`, with weights of `dtype`, or packed for it, on the CPU.

    Args:
        device: Where it is to run.

    Raises:
        LoadError: transformers does not know its architecture, or it lacks weights.
    """
    if importlib.util.find_spec("gguf") is None:
        raise LoadError(f"{location}: reading a GGUF file needs a package: pip install gguf")
    try:
        return _load(location, path, dtype, device)
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(f"cannot load {location!r}: {first_line(error)}") from error


class _File:
    """A GGUF file: its header, and its tensors' data where it lies."""

    def __init__(self, location: str, path: Path) -> None:
        self._location = location
        self.header = read_header(path)
        self._data = np.memmap(path, np.uint8, "r")

    def kind(self, called: str) -> str:
        """The tensor's block type, as gguf-py calls it."""
        from gguf import GGMLQuantizationType

        return str(GGMLQuantizationType(self.header.tensors[called].kind).name)

    def rows(self, called: str) -> Bytes:
        """The tensor's rows as they lie in the file: [..., bytes of a row]."""
        from gguf import GGMLQuantizationType
        from gguf.quants import quant_shape_to_byte_shape

        place = self.header.tensors[called]
        shape = quant_shape_to_byte_shape(place.shape, GGMLQuantizationType(place.kind))
        end = place.offset + int(np.prod(shape))
        if end > len(self._data):
            raise LoadError(
                f"{self._location} is cut off: {called} ends at byte {end}, the file at "
                f"{len(self._data)}; download it again"
            )
        return self._data[place.offset : end].reshape(shape)

    def values(self, called: str) -> npt.NDArray[Any]:
        """The tensor, dequantised."""
        from gguf import GGMLQuantizationType, dequantize

        place = self.header.tensors[called]
        values = dequantize(self.rows(called), GGMLQuantizationType(place.kind))
        return np.asarray(values.reshape(place.shape))


def _load(location: str, path: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    file = _File(location, path)
    with empty_parameters(), no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(
            _config(file.header), dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    keeps_blocks = dtype == torch.float32 and device.type == "cpu" and products.load() is not None
    weights = _read(location, file, model, dtype, keeps_blocks)
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    for name, source in tied.items():
        if name not in weights and source in weights:
            weights[name] = weights[source]
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes = {
        name: (_shape(weight), wanted[name])
        for name, weight in weights.items()
        if _shape(weight) != wanted[name]
    }
    missing, _ = without_known(model, wanted.keys() - weights.keys(), ())
    told = faults_in_words(missing, (), shapes)
    if told is not None:
        raise LoadError(f"{location}: the checkpoint {told}")
    # Plain ones first: a packed layer takes its bias with it.
    for name, weight in sorted(weights.items(), key=lambda item: _is_packed(item[1])):
        _place(model, name, weight)
    if _ROTARY_FACTORS in file.header.tensors:
        _divide_frequencies(location, model, file.values(_ROTARY_FACTORS))
    return model  # type: ignore[no-any-return]


def _config(header: Header) -> Any:
    """The config that transformers reads in the header."""
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with tempfile.NamedTemporaryFile(suffix=".gguf") as small:
        small.write(without_arrays(header))
        small.flush()
        found: dict[str, Any] = load_gguf_checkpoint(small.name)["config"]
    return AutoConfig.for_model(found.pop("model_type"), **found)


def _read(
    location: str, file: _File, model: Any, dtype: torch.dtype, keeps_blocks: bool
) -> dict[str, nn.Parameter | PackedWeight]:
    """The file's weights by the names that they have in `model`."""
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    architecture = file.header.values["general.architecture"]
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    names: dict[str, str] = get_gguf_hf_weights_map(model, processor)
    found: dict[str, nn.Parameter | PackedWeight] = {}
    # A processor that splits a tensor, or joins several, puts the results here itself.
    own: dict[str, dict[str, Tensor]] = {"tensors": {}}
    others = {"tensor_key_mapping": names, "parsed_parameters": own}
    unknown = []
    for called, place in file.header.tensors.items():
        name = names.get(called)
        format = format_of(file.kind(called)) if keeps_blocks else None
        if name is not None and format is not None and _can_keep(model, name):
            order = _row_order(processor, called, place, others)
            if order is not None:
                found[name] = pack_blocks(file.rows(called)[order], format, place.shape[-1])
                continue
        num_own = len(own["tensors"])
        result = processor.process(weights=file.values(called), name=called, **others)
        if result.name in names:
            own["tensors"][names[result.name]] = torch.from_numpy(np.array(result.weights))
        elif len(own["tensors"]) == num_own and called != _ROTARY_FACTORS:
            unknown.append(called)
    for name, tensor in own["tensors"].items():
        found[name] = nn.Parameter(tensor.to(dtype), requires_grad=False)
    if unknown:
        logger.warning(
            "%s: %d tensors are not used, transformers' %s has no place for them: %s",
            location, len(unknown), type(model).__name__, ", ".join(unknown[:8]),
        )  # fmt: skip
    return found


def _can_keep(model: nn.Module, name: str) -> bool:
    """Whether this parameter is the weight of a module that can do with blocks."""
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    return leaf == "weight" and (type(module) is nn.Linear or can_look_up(module))


def _row_order(
    processor: Any, called: str, place: TensorPlace, others: dict[str, Any]
) -> npt.NDArray[np.int64] | None:
    """Which of the file's rows stands where in the model; None: something else is done to them.

    Found by having a table of small numbers processed in the weight's place.
    """
    num_rows = place.shape[0]
    numbers = np.arange(2 * num_rows).reshape(num_rows, 2)
    result = processor.process(weights=numbers.copy(), name=called, **others)
    if result.name != called or result.weights.shape != numbers.shape:
        return None
    order: npt.NDArray[np.int64] = result.weights[:, 0] // 2
    are_rows = np.array_equal(np.sort(order), np.arange(num_rows))
    return order if are_rows and np.array_equal(result.weights, numbers[order]) else None


def _is_packed(weight: nn.Parameter | PackedWeight) -> bool:
    return isinstance(weight, PackedWeight)


def _shape(weight: nn.Parameter | PackedWeight) -> tuple[int, ...]:
    if isinstance(weight, PackedWeight):
        return weight.out_features, weight.in_features
    return tuple(weight.shape)


def _place(model: nn.Module, name: str, weight: nn.Parameter | PackedWeight) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if isinstance(weight, nn.Parameter):
        if leaf in module._parameters:
            module._parameters[leaf] = weight
        else:
            module._buffers[leaf] = weight.detach()
    elif isinstance(module, nn.Embedding):
        look_up_in(module, weight)
    else:
        assert isinstance(module, nn.Linear)
        grandparent, _, child = parent.rpartition(".")
        setattr(model.get_submodule(grandparent), child, PackedLinear(weight, module.bias))


def _divide_frequencies(location: str, model: nn.Module, factors: npt.NDArray[Any]) -> None:
    for name, frequencies in model.named_buffers():
        if name.endswith(("rotary_emb.inv_freq", "rotary_emb.original_inv_freq")):
            if frequencies.shape != factors.shape:
                raise LoadError(
                    f"{location}: {_ROTARY_FACTORS} has shape {list(factors.shape)}, the model "
                    f"{list(frequencies.shape)} frequencies; use the original checkpoint"
                )
            frequencies /= torch.from_numpy(factors.copy())
