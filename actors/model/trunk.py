"""A loaded language model in parts that a drafter may share: embedding, layers, states, head."""

from __future__ import annotations

import logging
import time
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from actors.model.compiled import chooses_compiled
from actors.model.experts import pack_experts
from actors.model.huge_pages import move_panels
from actors.model.inputs import FlatBatch
from actors.model.interface import batch_arguments
from actors.model.linear import fuse_projections, num_weights, pack_linears
from actors.model.loader import load_causal_lm, torch_dtype
from actors.model.rotary import RotaryTable
from actors.model.taps import TapHooks, Taps, TapSpec
from parallel.experts import ExpertExchange, ExpertShare
from parallel.groups import SingleRank, TPGroup
from parallel.topology import split_range
from specconfig.model import ModelConfig

logger = logging.getLogger(__name__)

CompileSetting = Literal["auto", "on", "off"]


class Output(NamedTuple):
    """Of one forward: logits [N, V] float32 of its logits rows, V this rank's part of the
    vocabulary (`Trunk.vocab`), and the states that were asked for."""

    logits: Tensor
    taps: Taps | None


class Trunk:
    """A causal language model's weights, prepared for serving.

    Nothing here sets a gradient mode: serving runs it in `torch.inference_mode`, a trainer that
    hands `taps` to a backward pass in `torch.no_grad`. The weights themselves are packed and have
    no gradient.

    Args:
        max_positions: Positions that may occur, for the rotary table.
        group: The ranks that the model is split over, and this one.
        experts: This rank's share of whole experts. Where it is one among several replicas,
            `join_replicas` comes before the first forward.
        taps: States to keep of each forward.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        max_positions: int,
        compile_layers: CompileSetting = "auto",
        group: TPGroup | None = None,
        experts: ExpertShare | None = None,
        taps: TapSpec | None = None,
    ) -> None:
        started = time.perf_counter()
        self.device = device
        self.group: TPGroup = group or SingleRank()
        self.dtype = torch_dtype(config.dtype, device, config.checkpoint_dtype)
        self.max_positions = max_positions
        self._exchange: ExpertExchange | None = None
        if experts is not None and experts.count > self.group.size:
            self._exchange = ExpertExchange()
        loaded = load_causal_lm(
            config.model,
            dtype=self.dtype,
            device=device,
            revision=config.revision,
            hf_overrides=config.hf_overrides,
            group=self.group,
            experts=experts,
            exchange=self._exchange,
        )
        self.model, self.layers, self.attention = loaded.model, loaded.layers, loaded.kv
        self.num_parameters = num_weights(self.model)
        self.vocab_size = config.vocab_size
        self.compiles = chooses_compiled(
            compile_layers,
            self.num_parameters,
            device,
            talks=self.group.size > 1 or self._exchange is not None,
        )
        self._decoder, self._states_type = loaded.decoder, loaded.states_type
        self.layer_list: nn.ModuleList = loaded.decoder.layers  # type: ignore[assignment]
        self._taps = TapHooks(taps or TapSpec(), self._decoder, self.layers)
        self._install_rotary()
        if self.compiles:
            fuse_projections(self.layers)
        packed, plain = pack_linears(self.model)
        num_experts_packed = pack_experts(self.model)
        move_panels(self.model)
        # Weights stacked in three dimensions are experts of a kind that was not packed.
        self.has_plain_experts = any(p.dim() == 3 for p in self.model.parameters())
        logger.info(
            "loaded %s: %.0fM parameters, %s on %s, %d linears packed, %d plain, %d expert layers "
            "packed, layers %s, %.1f s",
            config.model, self.num_parameters / 1e6, self.dtype, device, packed, plain,
            num_experts_packed, "compiled" if self.compiles else "eager",
            time.perf_counter() - started,
        )  # fmt: skip

    def _install_rotary(self) -> None:
        for name, module in list(self._decoder.named_children()):
            if "rotary" in name and not isinstance(module, nn.ModuleList):
                setattr(self._decoder, name, RotaryTable(module, self.max_positions))

    @property
    def vocab(self) -> tuple[int, int]:
        """[begin, end) of the ids whose logits this rank has: all of them on a single rank."""
        return split_range(self.vocab_size, self.group.rank, self.group.size)

    def join_replicas(self, group: TPGroup) -> None:
        """The group of this rank and the same rank of the replicas that share its experts."""
        assert self._exchange is not None
        self._exchange.group = group

    def embed(self, ids: Tensor) -> Tensor:
        """[T, H] of token ids int64 [T], whole on every rank; all ranks call it together.

        What the checkpoint's embedding gives: a factor that the decoder applies behind it (Gemma 2,
        Granite) is not in it.
        """
        embedding = self.model.get_input_embeddings()  # type: ignore[operator]
        found: Tensor = embedding(ids)
        return found

    def head(self, states: Tensor) -> Tensor:
        """Logits [T, V] float32, V as in `vocab`, of states [T, H] behind the final norm.

        Everything that the model does after its decoder: scales and soft caps included.
        """
        # The model's own code runs, with the states in place of what its decoder would give.
        given = self._states_type(last_hidden_state=states[None])
        self._decoder.forward = lambda *_, **__: given
        try:
            out = self.model(inputs_embeds=states[None], use_cache=False)
        finally:
            del self._decoder.forward
            self._taps.forget()
        logits: Tensor = out.logits[0].float()
        return logits

    def forward(self, batch: FlatBatch) -> Output:
        """Run the layers over the batch's rows; writes the KV of all of them.

        With no logits rows the KV is still written and the logits are empty.
        """
        if self._exchange is not None:
            self._exchange.begin(len(batch.input_ids), self.device)
        wanted = batch.logits_indices
        # The head needs at least one row; it is dropped again when none was asked for. 0: all rows,
        # without a copy of their states.
        keep: Tensor | int = wanted
        if len(wanted) == len(batch.input_ids):
            keep = 0
        elif not len(wanted):
            keep = torch.zeros(1, dtype=torch.int64, device=self.device)
        out = self.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=keep,
            **batch_arguments(batch.attention),
        )
        logits: Tensor = out.logits[0].float()
        return Output(logits[: len(wanted)], self._taps.take(batch))
