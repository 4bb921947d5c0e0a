"""A transformers model cut into one rank's shard, by the model's own plan.

`base_model_tp_plan` and `base_model_ep_plan` name, layer by layer, how weights split. From them
comes first which part of each parameter this rank holds (`plan_shard`, on a model without
weights), then, once those parts are loaded, the modules that talk to the other ranks
(`connect_shard`). Linear layers stay plain `nn.Linear`, smaller, so that whatever packs or
replaces them later need not know of ranks.

Input embedding and output head always split by vocabulary; the head's logits stay local.
"""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parallel.experts import ExpertExchange, ExpertShare
from parallel.groups import TPGroup
from parallel.topology import TopologyError, divisors, even_range, kv_head_range, split_range

logger = logging.getLogger(__name__)

_REPLICATED = {"replicate", "replicated_with_grad_allreduce"}
_EXPERT_MODULES = {"moe_tp_experts", "ep_dispatch_experts"}
# What stacked experts are called with, after the rows [n, H]: experts and their weights [n, k].
_ROUTED_CALLS = {("top_k_index", "top_k_weights"), ("router_indices", "routing_weights")}
# Fields that messages name when a dimension does not split.
_SIZE_FIELDS = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
    "num_local_experts", "num_experts", "n_routed_experts", "hidden_size",
)  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """What a rank keeps of a tensor: the `ranges` of dimension `dim`, one after the other."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


@dataclass
class ShardPlan:
    """One rank's part of a model: cuts by parameter name, styles by module name."""

    rank: int
    size: int
    vocab: tuple[int, int]
    cuts: dict[str, Cut] = field(default_factory=dict)
    styles: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def plan_shard(model: Any, rank: int, size: int, *, experts: ExpertShare | None) -> ShardPlan:
    """The shard of `rank`, from the plan that `model` (no weights needed) carries.

    Args:
        model: A transformers causal language model.
        rank: This rank.
        size: Number of ranks.
        experts: Keep this share of whole experts, instead of a part of each.

    Raises:
        TopologyError: no plan, a size that does not split, or a style that is not supported; names
            the field or the layer.
    """
    styles = _merged_styles(model, experts is not None)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise TopologyError(f"{type(model).__name__} has no linear output head to split")
    vocab_size = head.out_features
    plan = ShardPlan(rank, size, split_range(vocab_size, rank, size))
    embedding = model.get_input_embeddings()
    modules = dict(model.named_modules())
    planner = _Planner(plan, model.config, experts)
    for name, module in modules.items():
        style = styles.get(_pattern(name))
        if module is head:
            planner.cut_output(name, module, *plan.vocab)
            plan.styles[name] = "vocab_head"
        elif module is embedding:
            if style not in _REPLICATED:
                planner.cut_embedding(name, module)
        elif style is not None and style not in _REPLICATED:
            planner.cut_module(name, module, style)
    for name, parameter in model.named_parameters():
        style = styles.get(_pattern(name))
        if style is not None and style not in _REPLICATED and name not in plan.cuts:
            planner.cut_parameter(name, parameter, style)
    _check_experts(model, plan)
    return plan


def _merged_styles(model: Any, expert_parallel: bool) -> dict[str, str]:
    styles: dict[str, str] = dict(model.tp_plan or {})
    if expert_parallel:
        experts = dict(model.ep_plan or {})
        if not experts:
            raise TopologyError(
                f"{type(model).__name__} has no expert parallel plan; remove enable_expert_parallel"
            )
        owners = [key for key, style in experts.items() if style == "ep_dispatch_experts"]
        styles = {
            key: style
            for key, style in styles.items()
            if not any(key == owner or key.startswith(f"{owner}.") for owner in owners)
        }
        styles.update(experts)
    if not any(".layers." in f".{key}" or ".h." in f".{key}" for key in styles):
        raise TopologyError(
            f"{type(model).__name__} names no layers in its tensor parallel plan; serve it with "
            "tensor_parallel_size: 1"
        )
    return styles


def _pattern(name: str) -> str:
    """Module or parameter name as plans write it: indices become `*`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


class _Planner:
    """Fills a plan, one module or parameter at a time."""

    def __init__(self, plan: ShardPlan, config: Any, experts: ExpertShare | None) -> None:
        self._plan = plan
        self._config = config
        self._experts = experts
        self._where = (plan.rank, plan.size)

    def cut_module(self, name: str, module: nn.Module, style: str) -> None:
        if style in _EXPERT_MODULES:
            self._plan.styles[name] = style
            return
        if not isinstance(module, nn.Linear):
            raise TopologyError(
                f"{name}, a {type(module).__name__}, is planned as {style!r}; only linear layers "
                "split that way here: serve the model with tensor_parallel_size: 1"
            )
        if style == "colwise":
            self.cut_output(name, module, *self._output_range(name, module))
        elif style == "colwise_gather_output":
            self.cut_output(name, module, *self._even(module.out_features))
        elif style in ("rowwise", "rowwise_split_input"):
            begin, end = self._even(module.in_features)
            self._plan.cuts[f"{name}.weight"] = Cut(1, ((begin, end),))
        else:
            raise TopologyError(
                f"{name} is planned as {style!r}, which is not supported; serve the model with "
                "tensor_parallel_size: 1"
            )
        self._plan.styles[name] = style

    def _output_range(self, name: str, module: nn.Linear) -> tuple[int, int]:
        leaf = name.rpartition(".")[2]
        num_heads, num_kv_heads = self._config.num_attention_heads, _num_kv_heads(self._config)
        # Joined head by head: query, key and value of the first, then of the second.
        is_by_head = leaf == "query_key_value" and num_kv_heads == num_heads
        if not is_by_head and ("qkv" in leaf or leaf == "query_key_value"):
            raise TopologyError(
                f"{name} joins query, key and value, and the plan does not say where each part "
                "lies; serve the model with tensor_parallel_size: 1"
            )
        if leaf in ("k_proj", "v_proj"):
            begin, end = kv_head_range(num_kv_heads, *self._where)
            width = module.out_features // num_kv_heads
            return begin * width, end * width
        if leaf == "q_proj" or is_by_head:
            begin, end = even_range(num_heads, *self._where, "num_attention_heads")
            width = module.out_features // num_heads
            return begin * width, end * width
        return self._even(module.out_features)

    def cut_output(self, name: str, module: nn.Linear, begin: int, end: int) -> None:
        self._plan.cuts[f"{name}.weight"] = Cut(0, ((begin, end),))
        if module.bias is not None:
            self._plan.cuts[f"{name}.bias"] = Cut(0, ((begin, end),))

    def cut_embedding(self, name: str, module: nn.Module) -> None:
        if not isinstance(module, nn.Embedding):
            raise TopologyError(f"{name}, a {type(module).__name__}, is no embedding to split")
        rows = split_range(module.num_embeddings, *self._where)
        self._plan.cuts[f"{name}.weight"] = Cut(0, (rows,))
        self._plan.styles[name] = "vocab_embedding"

    def cut_parameter(self, name: str, parameter: Tensor, style: str) -> None:
        """A weight that is no linear layer's: the stacked weights of all experts of a layer."""
        num_dims = parameter.dim()
        if style == "grouped_gemm":
            self._plan.cuts[name] = Cut(0, (self._expert_range(parameter.shape[0]),))
        elif style in ("colwise", "rowwise"):
            # As for a linear's [out, in], whatever comes before.
            dim = num_dims - (2 if style == "colwise" and num_dims > 1 else 1)
            self._plan.cuts[name] = Cut(dim, (self._even(parameter.shape[dim]),))
        elif style in ("packed_colwise", "packed_rowwise"):
            dim = num_dims - (2 if style == "packed_colwise" and num_dims > 1 else 1)
            half = parameter.shape[dim] // 2
            begin, end = self._even(half)
            self._plan.cuts[name] = Cut(dim, ((begin, end), (half + begin, half + end)))
        else:
            raise TopologyError(
                f"{name} is planned as {style!r}, which is not supported; serve the model with "
                "tensor_parallel_size: 1"
            )

    def _expert_range(self, num_experts: int) -> tuple[int, int]:
        share = self._experts
        assert share is not None, "only expert parallel plans keep experts whole"
        if num_experts % share.count:
            raise TopologyError(
                f"{num_experts} experts do not split over {share.count} ranks (tensor_parallel_size"
                f" x data_parallel_size); use a product among {divisors(num_experts)}"
            )
        each = num_experts // share.count
        return share.index * each, (share.index + 1) * each

    def _even(self, total: int) -> tuple[int, int]:
        fields = [f for f in _SIZE_FIELDS if getattr(self._config, f, None) == total]
        return even_range(total, *self._where, fields[0] if fields else "a layer's width")


def _num_kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _check_experts(model: Any, plan: ShardPlan) -> None:
    """Stacked experts must be cut and reduced together, or neither."""
    for name, module in model.named_modules():
        stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        if not name.endswith("experts") or not stacked:
            continue
        is_cut = any(f"{name}.{leaf}" in plan.cuts for leaf, _ in module.named_parameters())
        is_joined = name in plan.styles
        if is_cut != is_joined:
            raise TopologyError(
                f"{name}: the plan cuts its weights but does not join its output, or the other "
                "way round; serve the model with tensor_parallel_size: 1"
            )
        if not is_cut:
            note = f"{_pattern(name)} has no entry in the plan: every rank holds all experts"
            if note not in plan.notes:
                plan.notes.append(note)


# --- after loading ----------------------------------------------------------------------------


class RowParallel(nn.Module):
    """Rows of a weight: partial products, summed over ranks. The bias comes after the sum."""

    bias: Tensor | None

    def __init__(self, linear: nn.Linear, group: TPGroup, *, splits_input: bool) -> None:
        super().__init__()
        self.group = group
        self.splits_input = splits_input
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())
        linear.register_parameter("bias", None)
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        if self.splits_input:
            width = x.shape[-1] // self.group.size
            x = x[..., self.group.rank * width : (self.group.rank + 1) * width]
        out = self.group.all_reduce(self.linear(x))
        return out if self.bias is None else out + self.bias


class GatheredColumns(nn.Module):
    """Columns of a weight whose whole output every rank needs."""

    def __init__(self, linear: nn.Linear, group: TPGroup) -> None:
        super().__init__()
        self.group = group
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        parts = self.group.all_gather(self.linear(x))  # [size, ..., columns of a rank]
        return parts.movedim(0, -2).flatten(-2)


def connect_shard(
    model: Any, plan: ShardPlan, group: TPGroup, exchange: ExpertExchange | None = None
) -> None:
    """Make the loaded shard compute with the others: sums, gathers, local head counts.

    `exchange`: to the other replicas that share the experts.

    Raises:
        TopologyError: an expert layer that cannot be given a part of the experts.
    """
    for name, style in plan.styles.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        if style in ("rowwise", "rowwise_split_input"):
            splits = style == "rowwise_split_input"
            _replace(model, name, RowParallel(module, group, splits_input=splits))
        elif style == "colwise_gather_output":
            _replace(model, name, GatheredColumns(module, group))
        elif style == "colwise" and name.rpartition(".")[2] == "q_proj":
            _set_head_counts(model.get_submodule(name.rpartition(".")[0]), model.config, plan)
        elif style == "vocab_embedding":
            _split_embedding(module, plan.cuts[f"{name}.weight"].ranges[0], group)
        elif style in _EXPERT_MODULES:
            _join_experts(name, module, style, plan, group, exchange)


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new)


def _set_head_counts(attention: nn.Module, config: Any, plan: ShardPlan) -> None:
    """Modeling code mostly infers head counts from shapes; where it stored them, correct them."""
    num_heads, num_kv_heads = config.num_attention_heads, _num_kv_heads(config)
    begin, end = kv_head_range(num_kv_heads, plan.rank, plan.size)
    local_heads, local_kv_heads = num_heads // plan.size, end - begin
    for attribute, whole, local in (
        ("num_heads", num_heads, local_heads),
        ("num_attention_heads", num_heads, local_heads),
        ("num_key_value_heads", num_kv_heads, local_kv_heads),
        ("num_kv_heads", num_kv_heads, local_kv_heads),
        ("num_key_value_groups", num_heads // num_kv_heads, local_heads // local_kv_heads),
    ):
        if getattr(attention, attribute, None) == whole:
            setattr(attention, attribute, local)


def _split_embedding(module: nn.Embedding, rows: tuple[int, int], group: TPGroup) -> None:
    """Each rank looks up its own ids; the others' rows are zero before the sum.

    The class's own forward runs, so that scaled embeddings keep their scale: the one that it has
    when it is called, since a table that is packed later is of another class.
    """
    begin, end = rows
    module.num_embeddings = end - begin
    module.padding_idx = None

    def forward(input_ids: Tensor) -> Tensor:
        local = input_ids - begin
        outside = (local < 0) | (local >= end - begin)
        found = type(module).forward(module, local.masked_fill(outside, 0))
        return group.all_reduce(found.masked_fill(outside[..., None], 0.0))

    module.forward = forward  # type: ignore[method-assign, assignment]


def _join_experts(
    name: str,
    module: nn.Module,
    style: str,
    plan: ShardPlan,
    group: TPGroup,
    exchange: ExpertExchange | None,
) -> None:
    whole = type(module).forward
    if style == "moe_tp_experts":
        for attribute in ("intermediate_dim", "intermediate_size"):
            width = getattr(module, attribute, None)
            if isinstance(width, int):
                setattr(module, attribute, width // plan.size)

        def cut(*args: Any, **kwargs: Any) -> Tensor:
            return group.all_reduce(whole(module, *args, **kwargs))

        module.forward = cut
        return
    if tuple(inspect.signature(whole).parameters)[2:] not in _ROUTED_CALLS:
        raise TopologyError(
            f"{name}: {type(module).__name__} routes in a way of its own and cannot be given a "
            "part of the experts; remove enable_expert_parallel"
        )
    begin, end = next(
        plan.cuts[f"{name}.{leaf}"].ranges[0]
        for leaf, _ in module.named_parameters()
        if f"{name}.{leaf}" in plan.cuts
    )
    count = end - begin
    module.num_experts = count  # type: ignore[assignment]
    # transformers' expert code skips the id behind the last expert when this is set.
    module._is_expert_parallel = True  # type: ignore[assignment]

    def spread(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = (hidden_states, top_k_index, top_k_weights)
        states, index, weights = rows if exchange is None else exchange.gather(*rows)
        local = index - begin
        outside = (local < 0) | (local >= count)
        out: Tensor = whole(
            module, states, local.masked_fill(outside, count), weights.masked_fill(outside, 0.0)
        )
        if exchange is not None:
            out = exchange.scatter(out, len(hidden_states))
        return group.all_reduce(out)

    module.forward = spread


def empty_parameters() -> Any:
    """Context in which new modules get parameters without memory, and real buffers."""
    return _EmptyParameters()


class _EmptyParameters:
    """Parameters on the meta device as they are registered; buffers hold computed constants
    (rotary frequencies, embedding scales) and are small, so they are made as usual."""

    def __enter__(self) -> None:
        self._register = register = nn.Module.register_parameter

        def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None and parameter.device.type != "meta":
                parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
            register(module, name, parameter)

        nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        nn.Module.register_parameter = self._register  # type: ignore[method-assign]


def local_shape(shape: torch.Size, cut: Cut | None) -> tuple[int, ...]:
    """Shape of what a rank keeps of a tensor of `shape`."""
    if cut is None:
        return tuple(shape)
    return (*shape[: cut.dim], cut.length, *shape[cut.dim + 1 :])
