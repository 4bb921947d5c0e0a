"""Read one rank's part of a safetensors checkpoint, and no other bytes.

Names and layouts on disk differ from the model's for some families: transformers keeps the
mapping. Renamings are applied as they are; of the conversions those are supported that stack
per-expert weights (and join gate and up), because a part of the result is a part of the sources.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from parallel.shard import Cut, local_shape
from parallel.topology import TopologyError
from parallel.weight_faults import faults_in_words, without_known

_INDEX = "model.safetensors.index.json"


class TensorFiles:
    """The tensors of a checkpoint folder's safetensors files, by their names on disk.

    `num_bytes_read` counts the bytes of the tensors' parts that were read.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self.num_bytes_read = 0
        self._files = _tensor_files(folder)
        self._open: dict[Path, Any] = {}

    @property
    def names(self) -> Set[str]:
        return self._files.keys()

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._view(name).get_shape())

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """What `cut` keeps of the tensor, on the device; floating point in the reader's dtype."""
        view = self._view(name)
        if cut is None:
            tensor: Tensor = view[...] if view.get_shape() else self._handle(name).get_tensor(name)
        else:
            before = (slice(None),) * cut.dim
            parts = [view[(*before, slice(begin, end))] for begin, end in cut.ranges]
            tensor = parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)
        self.num_bytes_read += tensor.numel() * tensor.element_size()
        if tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        return tensor.to(self._device).contiguous()

    def close(self) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()

    def _view(self, name: str) -> Any:
        return self._handle(name).get_slice(name)

    def _handle(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt").__enter__()  # type: ignore[no-untyped-call]
        return self._open[path]


class ShardReader:
    """Parts of a checkpoint folder's tensors, by the names that `model` (no weights needed) has."""

    def __init__(self, folder: Path, model: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._files = TensorFiles(folder, dtype, device)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._sources, self._unexpected = _sources_by_target(self._files.names, model, self._shapes)

    @property
    def num_bytes_read(self) -> int:
        return self._files.num_bytes_read

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def check(self, model: Any, tied: Mapping[str, str]) -> None:
        """Refuse a checkpoint that is not `model`'s; `tied`: names and where each may be instead.

        Raises:
            TopologyError: lists what is missing, unexpected, or of another shape.
        """
        missing = [
            name
            for name in self._shapes
            if name not in self and tied.get(name) not in self._sources
        ]
        wrong = {}
        for name, sources in self._sources.items():
            if len(sources) == 1 and sources[0][0] is None:
                there = self._files.shape(sources[0][1])
                if there != self._shapes[name]:
                    wrong[sources[0][1]] = (there, self._shapes[name])
        told = faults_in_words(*without_known(model, missing, self._unexpected), wrong)
        if told is not None:
            raise TopologyError(f"the checkpoint {told}")

    def read(self, name: str, cut: Cut | None) -> Tensor:
        """What `cut` keeps of the model's tensor `name`.

        Raises:
            TopologyError: its shape in the checkpoint is another, or the conversion is not one
                that parts can be read through.
        """
        target, sources = self._shapes[name], self._sources[name]
        if len(sources) == 1 and sources[0][0] is None:
            tensor = self._part(sources[0][1], cut, target)
        else:
            tensor = self._merged(name, sources, cut, target)
        wanted = local_shape(target, cut)
        if tuple(tensor.shape) != wanted:
            raise TopologyError(
                f"{name} has shape {tuple(tensor.shape)} in the checkpoint where {wanted} was "
                "expected"
            )
        return tensor

    def close(self) -> None:
        self._files.close()

    def _part(self, key: str, cut: Cut | None, whole: torch.Size | None) -> Tensor:
        shape = self._files.shape(key)
        if whole is not None and shape != whole:
            raise TopologyError(
                f"{key} has shape {tuple(shape)} in the checkpoint, {tuple(whole)} in the model"
            )
        return self._files.read(key, cut)

    def _merged(
        self, name: str, sources: list[tuple[Any, str]], cut: Cut | None, target: torch.Size
    ) -> Tensor:
        """Experts stacked on dimension 0; several weights of each joined on dimension 1."""
        converter = sources[0][0]
        patterns = _merge_patterns(name, converter)
        stacks: list[list[str]] = [[] for _ in patterns]
        for _, key in sources:
            stacks[_matching(patterns, key)].append(key)
        for stack in stacks:
            stack.sort(key=_natural)
            if len(stack) != target[0]:
                raise TopologyError(f"{name}: {len(stack)} experts on disk, not {target[0]}")
        experts = range(target[0])
        inner: list[Cut | None] = [None] * len(stacks)
        if cut is not None and cut.dim == 0:
            experts = range(*cut.ranges[0])
        elif cut is not None:
            inner = _inner_cuts(cut, len(stacks), target)
        return torch.stack(
            [
                torch.cat([self._part(s[e], c, None) for s, c in zip(stacks, inner, strict=True)])
                if len(stacks) > 1
                else self._part(stacks[0][e], inner[0], None)
                for e in experts
            ]
        )


def _inner_cuts(cut: Cut, num_parts: int, target: torch.Size) -> list[Cut | None]:
    """`cut` of a stacked tensor as cuts of its sources, which lack the first dimension."""
    if num_parts == 1 or cut.dim != 1:
        return [Cut(cut.dim - 1, cut.ranges)] * num_parts
    width = target[1] // num_parts
    if len(cut.ranges) != num_parts:
        raise TopologyError("a joined weight must be cut in each of its parts")
    return [
        Cut(0, ((begin - i * width, end - i * width),)) for i, (begin, end) in enumerate(cut.ranges)
    ]


def _tensor_files(folder: Path) -> dict[str, Path]:
    index = folder / _INDEX
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        absent = sorted({file for file in weight_map.values() if not (folder / file).is_file()})
        if absent:
            raise TopologyError(
                f"{_INDEX} names files that are not there: {', '.join(absent)}; download them"
            )
        return {key: folder / file for key, file in weight_map.items()}
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as handle:
            files.update((key, path) for key in handle.keys())  # noqa: SIM118
    return files


def _sources_by_target(
    names: Iterable[str], model: Any, shapes: dict[str, torch.Size]
) -> tuple[dict[str, list[tuple[Any, str]]], list[str]]:
    """For each tensor of the model: (conversion or None, name on disk) of what it is made of; and
    the names on disk that belong to none."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    sources: dict[str, list[tuple[Any, str]]] = defaultdict(list)
    unexpected: list[str] = []
    for key in names:
        if key in shapes:
            target, pattern = key, None
        else:
            target, pattern = rename_source_key(
                key, renamings, converters, model.base_model_prefix, shapes
            )
        if target in shapes:
            sources[target].append((by_pattern.get(pattern), key))
        else:
            unexpected.append(key)
    return sources, unexpected


def _merge_patterns(name: str, converter: Any) -> list[re.Pattern[str]]:
    operations = [type(op).__name__ for op in converter.operations]
    dims = [getattr(op, "dim", None) for op in converter.operations]
    if (operations, dims) not in (
        (["MergeModulelist"], [0]),
        (["MergeModulelist", "Concatenate"], [0, 1]),
    ):
        raise TopologyError(
            f"{name} is stored in another layout ({' then '.join(operations)}), of which no part "
            "can be read; serve the model with tensor_parallel_size: 1"
        )
    return [re.compile(p.replace("*.", r".*\.") + r"(?!\w)") for p in converter.source_patterns]


def _matching(patterns: list[re.Pattern[str]], key: str) -> int:
    return next(i for i, pattern in enumerate(patterns) if pattern.search(key))


def _natural(key: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)]
