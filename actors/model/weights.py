"""Weights by their names on disk, for modules that transformers does not know.

A drafter's checkpoint, or the layers inside a target's that its class drops when it loads (MTP).
What is asked for must be there, in the right shape, and nothing else beside it: a name read past
is a drafter that loads, runs and guesses nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from actors.errors import LoadError
from parallel.checkpoint import TensorFiles
from parallel.shard import Cut
from parallel.topology import TopologyError
from parallel.weight_faults import faults_in_words


def checkpoint_folder(location: str, revision: str | None) -> Path:
    """The directory of `location`, a directory or a hub id (downloaded: safetensors and JSON).

    Raises:
        LoadError: it cannot be downloaded.
    """
    path = Path(location).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                location, revision=revision, allow_patterns=["*.json", "*.safetensors"]
            )
        )
    except Exception as error:
        raise LoadError(f"cannot download {location!r}: {error}") from error


class NamedWeights:
    """The tensors of one checkpoint. A context manager: files stay open inside.

    Args:
        location: Directory or hub id; weights are read from safetensors only.
        dtype: Of floating point tensors, once read; others keep theirs.

    Raises:
        LoadError: no safetensors there.
    """

    def __init__(
        self,
        location: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        revision: str | None = None,
    ) -> None:
        self._location = location
        folder = checkpoint_folder(location, revision)
        try:
            self._files = TensorFiles(folder, dtype, device)
        except TopologyError as error:
            raise LoadError(f"{location}: {error}") from error
        if not self._files.names:
            found = sorted(p.name for p in folder.iterdir())[:5]
            raise LoadError(
                f"{location} holds {', '.join(found) or 'nothing'} but no *.safetensors; pickled "
                "weights are not loaded: convert them"
            )

    def __enter__(self) -> NamedWeights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._files.close()

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint ships it: a draft takes from the target what it does not."""
        return name in self._files.names

    def under(self, prefix: str) -> list[str]:
        """Names that begin with `prefix`, sorted."""
        return sorted(name for name in self._files.names if name.startswith(prefix))

    def read(
        self,
        shapes: Mapping[str, Sequence[int]],
        *,
        cuts: Mapping[str, Cut] | None = None,
        whole: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """The tensors named in `shapes`, which says what each must look like on disk.

        Args:
            cuts: What this rank keeps of some of them; all of the others.
            whole: Prefixes under which every name must be among `shapes` or `ignored`; the empty
                one for the whole checkpoint.
            ignored: Names that may be there and are not needed.

        Raises:
            LoadError: lists what is missing, unexpected, or of another shape.
        """
        there = {name for prefix in whole for name in self.under(prefix)}
        wrong = {
            name: (self._files.shape(name), shape)
            for name, shape in shapes.items()
            if name in self and list(self._files.shape(name)) != list(shape)
        }
        missing = [name for name in shapes if name not in self]
        told = faults_in_words(missing, there - set(shapes) - set(ignored), wrong)
        if told is not None:
            raise LoadError(f"{self._location} {told}")
        cuts = cuts or {}
        return {name: self._files.read(name, cuts.get(name)) for name in shapes}
