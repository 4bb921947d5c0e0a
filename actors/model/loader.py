"""Load a causal language model: from a directory, a hub id or a GGUF file.

Architectures are transformers' modeling classes; attention goes through our interface. Weights
are read by transformers from safetensors, one shard at a time, never from pickles. What cannot be
served is refused here, before any memory for KV is taken, with the reason.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from actors.errors import LoadError, first_line
from actors.model import interface
from actors.model.discovery import discover_kv
from actors.model.gguf_file import load_gguf
from actors.model.kv import KVGeometry
from actors.model.sharded import load_shard
from parallel.experts import ExpertExchange, ExpertShare
from parallel.groups import RankGroup, SingleRank, TPGroup
from parallel.weight_faults import faults_in_words, without_known

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for paged KV.

    `kv` lists each attention layer with what it must cache. `decoder` holds the layers and ends
    with the final norm; calling it gives a `states_type` with the field `last_hidden_state`.
    """

    model: nn.Module
    layers: tuple[nn.Module, ...]
    kv: tuple[KVGeometry, ...]
    decoder: nn.Module
    states_type: type


def torch_dtype(name: str, device: torch.device, checkpoint_dtype: str) -> torch.dtype:
    """`name` from the config; 'auto' is the checkpoint's dtype on a GPU, float32 on a CPU."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else checkpoint_dtype
    if name not in _DTYPES:
        raise LoadError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load_causal_lm(
    location: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    revision: str | None = None,
    hf_overrides: dict[str, Any] | None = None,
    group: TPGroup | None = None,
    experts: ExpertShare | None = None,
    exchange: ExpertExchange | None = None,
) -> LoadedModel:
    """Load `location` (directory, `*.gguf` file or hub id) in eval mode on `device`.

    With a `group` of several ranks only this rank's shard is read; `kv` then describes the
    rank's own heads, and the model's logits are those of the rank's part of the vocabulary.
    `experts` and `exchange`: see `load_shard`.

    Raises:
        LoadError: with what is wrong and what to do, for everything that cannot be served.
    """
    interface.register()
    path = Path(location).expanduser()
    source, gguf = _source(location, path)
    group = group or SingleRank()
    is_split = group.size > 1 or exchange is not None
    if gguf and is_split:
        raise LoadError(
            f"{location}: a GGUF file is read whole; to split the model over several ranks use its "
            "safetensors"
        )
    common: dict[str, Any] = {"revision": revision} if revision else {}
    if not gguf and path.is_dir() and not any(path.glob("*.safetensors")):
        found = sorted(p.name for p in path.glob("*.bin")) or ["no weight files"]
        raise LoadError(
            f"{location} holds {', '.join(found[:3])} but no *.safetensors; pickled weights are "
            "not loaded: convert them with transformers' save_pretrained"
        )
    config: Any = None
    if gguf and hf_overrides:
        raise LoadError(
            f"{location}: hf_overrides={hf_overrides} do not reach a GGUF file, whose header is "
            "its config; convert it with transformers' save_pretrained, or remove hf_overrides"
        )
    if not gguf:
        config = _read_config(location, source, common)
        override(config, hf_overrides or {})
    model: Any
    if gguf:
        model = load_gguf(location, path, dtype, device)
    elif is_split:
        model = load_shard(
            source,
            config,
            dtype=dtype,
            device=device,
            group=group,
            experts=experts,
            exchange=exchange,
            revision=revision,
        )
    else:
        model = _load_whole(location, source, config, dtype, common)
    model = model.to(device).eval().requires_grad_(False)
    # Shapes only: other ranks may still be loading.
    with group.muted() if isinstance(group, RankGroup) else nullcontext():
        return look_into(model, location)


def _load_whole(
    location: str, source: str, config: Any, dtype: torch.dtype, options: dict[str, Any]
) -> Any:
    """The model with all its weights, as transformers reads them from `source`."""
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation=interface.ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            # Not to load them: so that all that is wrong is told at once.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    except Exception as error:
        raise LoadError(f"cannot load {location!r}: {first_line(error)}") from error
    _refuse_faults(location, model, report)
    return model


def _refuse_faults(location: str, model: Any, report: dict[str, Any]) -> None:
    """Raise LoadError when transformers made up a weight, or left one out."""
    missing, unexpected = without_known(model, report["missing_keys"], report["unexpected_keys"])
    shapes = {name: (there, wanted) for name, there, wanted in report["mismatched_keys"]}
    told = faults_in_words(missing, unexpected, shapes)
    if told is not None:
        raise LoadError(f"{location}: the checkpoint {told}")


def look_into(model: nn.Module, location: str) -> LoadedModel:
    """`model`, its layers and what they cache, found by running one token.

    Raises:
        LoadError: it has layers that cannot be served.
    """
    layers = decoder_layers(model, location)
    outputs: list[type] = []
    decoder = decoder_of(model)
    assert decoder is not None
    noting = decoder.register_forward_hook(lambda *call: outputs.append(type(call[-1])))
    try:
        kv = discover_kv(model, layers, location)
    finally:
        noting.remove()
    return LoadedModel(model, layers, kv, decoder, outputs[0])


def _read_config(location: str, source: str, common: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **common)
    except Exception as error:
        raise LoadError(f"cannot read the config of {location!r}: {first_line(error)}") from error
    if getattr(config, "quantization_config", None):
        raise LoadError(
            f"{location} is quantised ({config.quantization_config.get('quant_method', '?')}); "
            "quantised checkpoints are not supported: use the unquantised one"
        )
    return config


def override(config: Any, changes: dict[str, Any]) -> None:
    """Set `changes` in a transformers config. A dictionary changes what it names inside the
    attribute, a nested config or dictionary, and leaves the rest of that."""
    for key, value in changes.items():
        current = getattr(config, key, None)
        if isinstance(value, dict) and hasattr(current, "to_dict"):
            override(current, value)
        else:
            setattr(config, key, _merged(current, value))


def _merged(current: Any, value: Any) -> Any:
    if not (isinstance(current, dict) and isinstance(value, dict)):
        return value
    return {**current, **{key: _merged(current.get(key), new) for key, new in value.items()}}


def _source(location: str, path: Path) -> tuple[str, str | None]:
    """(what to hand to from_pretrained, GGUF file name or None)."""
    if path.suffix == ".gguf":
        if not path.is_file():
            raise LoadError(f"GGUF file {location} does not exist")
        return str(path.parent), path.name
    if path.is_dir():
        return str(path), None
    if path.exists():
        raise LoadError(f"{location} is a file; give a model directory, a *.gguf file or a hub id")
    if location.startswith(("/", "./", "../", "~")):
        raise LoadError(f"model directory {location} does not exist")
    return location, None


def decoder_of(model: nn.Module) -> nn.Module | None:
    """The module that holds the decoder layers, or None."""
    found: nn.Module | None = model.get_decoder() if hasattr(model, "get_decoder") else None  # type: ignore[operator]
    if found is model:  # some classes know no better
        found = next((child for child in model.children() if hasattr(child, "layers")), None)
    return found


def decoder_layers(model: nn.Module, location: str) -> tuple[nn.Module, ...]:
    """The model's layers in order.

    Raises:
        LoadError: it has none; `location` is for the message.
    """
    layers = getattr(decoder_of(model), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise LoadError(
            f"{location}: {type(model).__name__} has no list of decoder layers; only decoder-only "
            "language models are served"
        )
    return tuple(layers)
