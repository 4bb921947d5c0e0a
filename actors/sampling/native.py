"""`LocalScores` by the C kernel: CPU, one pass over a row where that is enough."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.native import build
from actors.sampling.scores import LocalScores, TorchScores, Vocabulary

_SOURCE = Path(build.__file__).with_name("sampling.c")
_BLOCK = 64  # B of the C file
_P, _I = ctypes.c_void_p, ctypes.c_int64
_ROWS = [_P, _I, _P]  # logits, stride, index
_SIZE = [_I, _I]
_ARGUMENTS: dict[str, list[Any]] = {
    "row_max": [*_ROWS, *_SIZE, _P, _P, _P],
    "top_n": [*_ROWS, _P, *_SIZE, _P, _I, _P, _P],
    "total_mass": [*_ROWS, _P, *_SIZE, _P, _P, _P],
    "histogram": [*_ROWS, _P, *_SIZE, _P, _P, _I, _P, _P],
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
    return lib


class NativeVocabulary(Vocabulary):
    """With ids and spots padded to whole blocks, as the kernel reads them."""

    def __init__(self, ids_V: Tensor) -> None:
        super().__init__(ids_V)
        missing = (0, -len(ids_V) % _BLOCK)
        self.padded_ids = torch.nn.functional.pad(self.ids_V, missing)
        self.padded_spots = torch.nn.functional.pad(self.spots_V, missing)


class NativeScores(TorchScores):
    """Overrides what is asked in every step; the logits are float32 on CPU, columns adjacent."""

    vocab: NativeVocabulary

    def best(self) -> tuple[Tensor, Tensor]:
        values, columns = torch.empty(len(self.index)), self._ints()
        self._call("row_max", self.vocab.padded_ids, values, columns, temperature=False)
        return values, columns

    def top_n(self, n: int) -> tuple[Tensor, Tensor]:
        values = torch.empty(len(self.index), n)
        columns = torch.empty(len(self.index), n, dtype=torch.int64)
        if self._call("top_n", self.vocab.padded_ids, n, values, columns):
            raise MemoryError("no memory for the sampler's candidates")
        return values, columns

    def total_mass(self, lowest_M: Tensor, top_M: Tensor) -> Tensor:
        total = self._ints()
        self._call("total_mass", lowest_M, top_M, total)
        return total

    def histogram(
        self, lowest_M: Tensor, top_M: Tensor | None, shift: int, prefix_M: Tensor
    ) -> Tensor:
        bins = torch.empty(len(self.index), 256, dtype=torch.int64)
        self._call("histogram", lowest_M, top_M, shift, prefix_M, bins)
        return bins

    def draw(self, key_M: Tensor, lowest_M: Tensor, start_M: Tensor) -> tuple[Tensor, Tensor]:
        values, columns = torch.empty(len(self.index), dtype=torch.float64), self._ints()
        vocab = self.vocab
        self._call(
            "draw", vocab.padded_ids, vocab.padded_spots, lowest_M, key_M, start_M, values, columns
        )
        return values, columns

    def _ints(self) -> Tensor:
        return torch.empty(len(self.index), dtype=torch.int64)

    def _call(self, name: str, *arguments: Tensor | int | None, temperature: bool = True) -> int:
        """Run a kernel over the rows. Tensors are passed by address and must be contiguous."""
        lib = load()
        assert lib is not None
        head = [self.logits, self.logits.stride(0), self.index]
        if temperature:
            head.append(self.temperature)
        passed = [*head, len(self.index), self.logits.shape[1], *arguments]
        found: int = getattr(lib, name)(
            *[a.data_ptr() if isinstance(a, Tensor) else a for a in passed],
            torch.get_num_threads(),
        )
        return found


def vocabulary(ids_V: Tensor) -> Vocabulary:
    """The columns' ids, in the form that this machine's scores need."""
    is_native = ids_V.device.type == "cpu" and load() is not None
    return NativeVocabulary(ids_V) if is_native else Vocabulary(ids_V)


def local_scores(logits: Tensor, vocab: Vocabulary) -> LocalScores:
    """Scores of all rows of `logits` (float32 [N, V]) at temperature 1."""
    index = torch.arange(len(logits), device=logits.device)
    kind = NativeScores if isinstance(vocab, NativeVocabulary) else TorchScores
    return kind(logits, vocab, index, torch.ones(len(logits), device=logits.device))
