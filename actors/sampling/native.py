"""`LocalScores` by the C kernel, for logits on CPU."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.native import build
from actors.sampling.scores import (
    NUM_BINS,
    Float64Array,
    LocalScores,
    TorchScores,
    Vocabulary,
)
from actors.sampling.uniforms import Int64Array
from actors.steps.messages import Float32Array

_SOURCE = Path(build.__file__).with_name("sampling.c")
_BLOCK = 64  # B of the C file
_P, _I = ctypes.c_void_p, ctypes.c_int64
_ROWS = [_P, _I, _P]  # logits, stride, index
_SIZE = [_I, _I]
_ARGUMENTS: dict[str, list[Any]] = {
    "row_max": [*_ROWS, *_SIZE, _P, _P, _P],
    "top_n": [*_ROWS, _P, *_SIZE, _P, _I, _P, _P],
    "by_distance": [*_ROWS, _P, *_SIZE, _P, _P, _I, _P],
    "by_key": [*_ROWS, _P, *_SIZE, _P, _I, _P, _P, _I, _I, _P],
    "draw": [*_ROWS, _P, *_SIZE, _P, _P, _P, _P, _P, _P, _P],
}


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | None:
    """The compiled kernel, built on first use, or None when this machine cannot build it."""
    # Masses are integers that torch computes too: no step of theirs may be fused with the next.
    lib = build.load_library(_SOURCE, ("-ffp-contract=off",), "sampling")
    if lib is None:
        return None
    for name, arguments in _ARGUMENTS.items():
        function = getattr(lib, name)
        function.argtypes = [*arguments, ctypes.c_int]
        function.restype = ctypes.c_int if name == "top_n" else None
    lib.weigh.argtypes = [_P, _P, _I, _I, _P]
    lib.weigh.restype = None
    return lib


class NativeVocabulary(Vocabulary):
    """With ids and spots padded to whole blocks, as the kernel reads them."""

    def __init__(self, ids_V: Tensor, lib: ctypes.CDLL) -> None:
        super().__init__(ids_V)
        self.lib = lib
        missing = (0, -len(ids_V) % _BLOCK)
        self.padded_ids = np.pad(self.ids, missing)
        self.padded_spots = np.pad(self.spots_V.numpy(), missing)


class NativeScores(TorchScores):
    """The logits are float32 on CPU, columns adjacent."""

    vocab: NativeVocabulary

    def best(self) -> tuple[Float32Array, Int64Array]:
        values, columns = np.empty(len(self.index), np.float32), np.empty_like(self.index)
        self._call("row_max", self.vocab.padded_ids, values, columns, temperature=False)
        return values, columns

    def top_n(self, n: int) -> tuple[Float32Array, Int64Array]:
        values = np.empty((len(self.index), n), np.float32)
        columns = np.empty((len(self.index), n), np.int64)
        if self._call("top_n", self.vocab.padded_ids, n, values, columns):
            raise MemoryError("no memory for the sampler's candidates")
        return values, columns

    def weigh(self, scores_MC: Float32Array, top_M: Float32Array) -> Int64Array:
        found = np.empty(scores_MC.shape, np.int64)
        address = (_address(scores_MC), _address(top_M))
        self.vocab.lib.weigh(*address, *scores_MC.shape, _address(found))
        return found

    def by_distance(self, lowest_M: Float32Array, top_M: Float32Array, is_mass: bool) -> Int64Array:
        bins = np.empty((len(self.index), NUM_BINS), np.int64)
        self._call("by_distance", lowest_M, top_M, is_mass, bins)
        return bins

    def by_key(
        self,
        top_M: Float32Array,
        is_mass: bool,
        distance_M: Int64Array,
        last_M: Int64Array,
        width: int,
        shift: int,
    ) -> Int64Array:
        bins = np.empty((len(self.index), NUM_BINS), np.int64)
        self._call("by_key", top_M, is_mass, distance_M, last_M, width, shift, bins)
        return bins

    def draw(
        self, key_M: Int64Array, lowest_M: Float32Array, start_M: Int64Array
    ) -> tuple[Float64Array, Int64Array]:
        values, columns = np.empty(len(self.index)), np.empty_like(self.index)
        ids, spots = self.vocab.padded_ids, self.vocab.padded_spots
        self._call("draw", ids, spots, lowest_M, key_M, start_M, values, columns)
        return values, columns

    def _call(self, name: str, *arguments: npt.NDArray[Any] | int, temperature: bool = True) -> int:
        """Run a kernel over the rows. Arrays are passed by address and must be contiguous."""
        rows = [self.logits.data_ptr(), self.logits.stride(0), _address(self.index)]
        if temperature:
            rows.append(_address(self.temperature))
        rest = [_address(a) if isinstance(a, np.ndarray) else a for a in arguments]
        found: int = getattr(self.vocab.lib, name)(
            *rows, len(self.index), self.logits.shape[1], *rest, torch.get_num_threads()
        )
        return found


def _address(array: npt.NDArray[Any]) -> int:
    """Of an array's data, by the way that takes least time."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


def vocabulary(ids_V: Tensor) -> Vocabulary:
    """The columns' ids, in the form that this machine's scores need."""
    lib = load() if ids_V.device.type == "cpu" else None
    return Vocabulary(ids_V) if lib is None else NativeVocabulary(ids_V, lib)


def local_scores(logits: Tensor, vocab: Vocabulary) -> LocalScores:
    """Scores of all rows of `logits` (float32 [N, V]) at temperature 1."""
    kind = NativeScores if isinstance(vocab, NativeVocabulary) else TorchScores
    return kind(logits, vocab, np.arange(len(logits)), np.ones(len(logits), np.float32))
