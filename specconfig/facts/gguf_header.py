"""The header of a GGUF file, and model facts from it under Hugging Face names. Tensor data is never
touched."""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

from specconfig.errors import FactsUnavailable, FormatError

_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}


_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_TOKENS = "tokenizer.ggml.tokens"
_VERSIONS = (2, 3)
_PART = re.compile(r"-\d{5}-of-\d{5}$")


class TensorPlace(NamedTuple):
    """Where a tensor lies. `kind`: GGUF's number of its block type; `shape`: as numpy has it, the
    rows' length last; `offset`: in bytes, from the file's begin."""

    kind: int
    shape: tuple[int, ...]
    offset: int


class Header:
    """All of a GGUF file but its tensors' data: scalars and strings, the lengths of arrays, and
    where each tensor lies.

    `tokens`: the vocabulary, where it is asked for. `plain`: the file's own bytes of all entries
    that are no arrays.

    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Read here and not with the `gguf`
    package, because that builds an array for each of a vocabulary's strings: 14 s for 262,144 of
    them, in every process that resolves a configuration.
    """

    def __init__(self, data: mmap.mmap, with_tokens: bool) -> None:
        self._data = data
        self._with_tokens = with_tokens
        self.tokens: list[str] = []
        self._at = 0
        self.values: dict[str, Any] = {}
        self.lengths: dict[str, int] = {}
        self.plain: list[bytes] = []
        self.tensors: dict[str, TensorPlace] = {}
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise ValueError(f"GGUF version {version}; versions {_VERSIONS} are read")
        num_tensors = self._scalar("<Q")
        for _ in range(self._scalar("<Q")):
            self._entry()
        for _ in range(num_tensors):
            self._tensor()
        # Offsets are counted from where the data begins.
        alignment = int(self.values.get("general.alignment") or 32)
        begin = -(-self._at // alignment) * alignment
        self.tensors = {
            name: place._replace(offset=begin + place.offset)
            for name, place in self.tensors.items()
        }

    def _entry(self) -> None:
        begin = self._at
        key = self._string()
        kind = self._scalar("<I")
        if kind != _ARRAY:
            self.values[key] = self._string() if kind == _STRING else self._scalar(_format(kind))
            self.plain.append(self._data[begin : self._at])
            return
        kind, length = self._scalar("<I"), self._scalar("<Q")
        self.lengths[key] = length
        if kind == _STRING and key == _TOKENS and self._with_tokens:
            self.tokens = [self._string() for _ in range(length)]
        elif kind == _STRING:
            for _ in range(length):
                self._at += 8 + struct.unpack_from("<Q", self._data, self._at)[0]
        else:
            self._at += length * struct.calcsize(_format(kind))

    def _tensor(self) -> None:
        name = self._string()
        lengths = [self._scalar("<Q") for _ in range(self._scalar("<I"))]
        kind, offset = self._scalar("<I"), self._scalar("<Q")
        self.tensors[name] = TensorPlace(kind, tuple(reversed(lengths)), offset)

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        if length > len(self._data) - self._at:
            raise ValueError("it ends in the middle of a string")
        text = self._data[self._at : self._at + length].decode(errors="replace")
        self._at += length
        return text


def _format(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"value type {kind} is unknown")
    return _SCALARS[kind]


def read_header(path: Path, *, with_tokens: bool = False) -> Header:
    """The header of a GGUF file.

    Raises:
        FactsUnavailable: the file is not GGUF, or is cut off.
        FormatError: it is one part of several.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = Header(data, with_tokens)
    except (ValueError, OSError, struct.error) as error:
        raise FactsUnavailable(
            "model", str(path), "a readable GGUF file", f"download it again ({error})"
        ) from error
    num_parts = int(header.values.get("split.count") or 1)
    if num_parts > 1:
        raise _one_of_several(path, int(header.values.get("split.no") or 0), num_parts)
    return header


def without_arrays(header: Header) -> bytes:
    """A GGUF file of the header's scalars and strings and its tensors' names, the tensors empty:
    for readers to whom a vocabulary is expensive and that want to know the model's shape."""
    architecture = header.values.get("general.architecture")
    entries, key = list(header.plain), f"{architecture}.vocab_size".encode()
    if _TOKENS in header.lengths and key.decode() not in header.values:
        number = struct.pack("<II", 4, header.lengths[_TOKENS])
        entries.append(struct.pack("<Q", len(key)) + key + number)
    names = [name.encode() for name in header.tensors]
    tensors = [
        struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 0, 0, 0) for name in names
    ]
    begin = b"GGUF" + struct.pack("<IQQ", _VERSIONS[-1], len(tensors), len(entries))
    return b"".join([begin, *entries, *tensors]) + bytes(64)


def _one_of_several(path: Path, index: int, count: int) -> FormatError:
    """What to do with part `index` (from 0) of a split file: only whole ones are read."""
    stem = _PART.sub("", path.stem)
    names = [f"{stem}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1)]
    absent = [n for n in names if n != names[index] and not (path.parent / n).is_file()]
    fix = f"join them: llama-gguf-split --merge {names[0]} {stem}.gguf, and serve that"
    if absent:
        fix = f"get the missing parts ({', '.join(absent)}), then {fix}"
    return FormatError("split.count", count, "1: a file that holds all weights", fix,
                       message=f"{path} is part {index + 1} of {count} of a split GGUF file, whose "
                       f"other weights would be missing; {fix}")  # fmt: skip


def read_gguf_facts(path: Path) -> dict[str, Any]:
    """Config dict of a GGUF file.

    Raises:
        FactsUnavailable: the file is not GGUF, or is cut off.
        FormatError: an architecture we cannot map, or one part of several.
    """
    header = read_header(path)
    value = header.values.get
    name = value("general.architecture")
    if name not in _ARCHITECTURES:
        raise FormatError(
            "general.architecture",
            name,
            f"one of {sorted(_ARCHITECTURES)}",
            "use the original Hugging Face checkpoint",
        )
    model_type, architecture = _ARCHITECTURES[name]
    facts: dict[str, Any] = {"model_type": model_type, "architectures": [architecture]}
    for source, key in _KEYS.items():
        if f"{name}.{source}" in header.lengths:
            raise FormatError(
                f"{name}.{source}",
                f"an array of {header.lengths[f'{name}.{source}']}",
                "one number for all layers",
                "use the original Hugging Face checkpoint",
            )
        found = value(f"{name}.{source}")
        if found is not None:
            facts[key] = found
    if "vocab_size" not in facts:
        tokens = header.lengths.get(_TOKENS)
        if tokens is not None:
            facts["vocab_size"] = tokens
    if "head_dim" not in facts and facts.get("num_attention_heads"):
        # GGUF's own default; the class default of an HF type may be another.
        facts["head_dim"] = facts["hidden_size"] // facts["num_attention_heads"]
    for role in ("bos", "eos"):
        found = value(f"tokenizer.ggml.{role}_token_id")
        if found is not None:
            facts[f"{role}_token_id"] = int(found)
    scaling = value(f"{name}.rope.scaling.type")
    if scaling not in (None, "none"):
        facts["rope_scaling"] = {
            "rope_type": scaling,
            "factor": value(f"{name}.rope.scaling.factor") or 1.0,
            "original_max_position_embeddings": value(
                f"{name}.rope.scaling.original_context_length"
            ),
        }
    facts["quantization_config"] = {"quant_method": "gguf"}
    facts["dtype"] = "float16"
    return facts
