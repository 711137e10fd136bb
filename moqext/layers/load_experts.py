"""A layer of experts of a checkpoint made ready to run: `Checkpoint.load` of their container."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from moqext._C import UnsupportedQuantization, describe_tensor
from moqext.algorithms import ALGORITHMS
from moqext.errors import CheckpointError
from moqext.layers.expert_form import ExpertForm, check_size, find_forms, instead_of_running
from moqext.layers.method import ParamSpec
from moqext.layers.moe import MoEMethod
from moqext.layers.read_stacks import fill_stacks, read_input_scales
from moqext.layers.stacks import ExpertStacks
from moqext.ops import to_device, to_host
from moqext.ops.spelling import SWIGLU, Activation, Compute, Device, Dtype, Tensor
from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.config.expert_config import read_expert_config
from moqext.reader.findings.lost_gates import lost_gate
from moqext.reader.records import LayerRecord, is_gated, parts_of, role_of


class ExpertPart(NamedTuple):
    """The experts of a layer that have one format.

    Attributes:
        experts: Their numbers in the container, in the order of the stacks.
        method: The `MoEMethod`.
        params: What `method.prepare` returned.
    """

    experts: tuple[int, ...]
    method: MoEMethod
    params: Mapping[str, Any]


class ExpertLayer:
    """A layer of experts with its prepared parameters: `y = layer(x, topk_weights, topk_ids)`.

    Attributes:
        names: The container in the checkpoint.
        parts: One `ExpertPart` for each format that experts have, nearly always one.
        experts: The numbers in the container of those that are here, in order.
        global_num_experts: How many the container has, and `topk_ids` tells of.
    """

    __slots__ = ("_maps", "experts", "global_num_experts", "names", "parts")

    def __init__(
        self, name: str, parts: Sequence[ExpertPart], experts: Sequence[int], global_num_experts: int
    ) -> None:
        self.names = (name,)
        self.parts = tuple(parts)
        self.experts = tuple(experts)
        self.global_num_experts = global_num_experts
        own = np.full(global_num_experts, -1, np.int32)
        own[list(experts)] = np.arange(len(experts), dtype=np.int32)
        all_here = self.experts == tuple(range(global_num_experts)) and len(self.parts) == 1
        self._maps = [None] if all_here else self._map_parts(own)

    def __call__(
        self,
        x: Tensor,
        topk_weights: Any,
        topk_ids: Any,
        expert_map: Any = None,
        apply_router_weight_on_input: bool = False,
        out: Any = None,
        accumulate: bool = False,
        stream: Any = None,
    ) -> Tensor:
        """Computes the experts of each token and their weighted sum; see `MoEMethod.__call__`.

        Args:
            x: [..., hidden_size] of the layer's dtype.
            topk_weights: float32 [..., top_k].
            topk_ids: int32 or int64 [..., top_k], numbers of experts in the container.
            expert_map: int32 [global_num_experts]: the place of each expert in `experts`, -1 for one whose
                slots count nothing. None maps each expert that is here to its place. Where experts are in
                several formats a map on a CUDA device is read, which waits for it.
            apply_router_weight_on_input: Weights multiply x instead of outputs; top_k has to be 1.
            out: [..., hidden_size] to be written.
            accumulate: Adds to what `out` holds.
            stream: CUDA stream; must be None on the CPU.

        Returns:
            `out`, or a new tensor of x's own framework. Where experts are in several formats the sum of each
            format is rounded to the dtype, else all is rounded once.
        """
        maps = self._maps
        if expert_map is not None:
            maps = [expert_map] if len(self.parts) == 1 else self._map_parts(self._host_map(expert_map))
        for place, (part, local) in enumerate(zip(self.parts, maps, strict=True)):
            out = part.method(
                x,
                part.params,
                topk_weights,
                topk_ids,
                local,
                apply_router_weight_on_input,
                out,
                accumulate or place > 0,
                stream,
            )
        return cast(Tensor, out)

    def _host_map(self, expert_map: Any) -> NDArray[np.int32]:
        if describe_tensor(expert_map)["device"] != "cpu":
            expert_map = to_host(expert_map)
        given = expert_map if isinstance(expert_map, np.ndarray) else np.from_dlpack(expert_map)
        if given.dtype != np.int32 or given.shape != (self.global_num_experts,):
            raise ValueError(
                f"expert_map: expected int32 [{self.global_num_experts}], got {given.dtype} "
                f"{list(given.shape)}"
            )
        return cast(NDArray[np.int32], given)

    def _map_parts(self, places: NDArray[np.int32]) -> list[Any]:
        """For each part the map to its stacks, where they are, from that to places in `experts`."""
        here = (places >= 0) & (places < len(self.experts))
        maps: list[Any] = []
        for part in self.parts:
            rows = {number: row for row, number in enumerate(part.experts)}
            local = np.array([*(rows.get(number, -1) for number in self.experts), -1], np.int32)
            maps.append(_beside(local[np.where(here, places, -1)], part.method))
        return maps

    @property
    def method(self) -> MoEMethod:
        """The method, where experts have one format; see `parts` for several."""
        return self._only_part().method

    @property
    def params(self) -> Mapping[str, Any]:
        """The prepared tensors, where experts have one format; see `parts` for several."""
        return self._only_part().params

    def _only_part(self) -> ExpertPart:
        if len(self.parts) > 1:
            raise ValueError(f"{self.names[0]} has {len(self.parts)} formats, one method for each: see parts")
        return self.parts[0]

    @property
    def num_experts(self) -> int:
        """How many experts are here."""
        return len(self.experts)

    @property
    def hidden_size(self) -> int:
        """Columns of x and y."""
        return self.parts[0].method.hidden_size

    @property
    def intermediate_size(self) -> int:
        """Width of an expert."""
        return self.parts[0].method.intermediate_size

    @property
    def top_k(self) -> int:
        """Slots of a token."""
        return self.parts[0].method.top_k

    @property
    def backend(self) -> str:
        """The kernel that runs one token, as "family:name"; of the first format where there are several."""
        return self.parts[0].method.backend

    def backend_for(self, tokens: int) -> str:
        """The kernel that runs so many tokens; see `MoEMethod.backend_for`."""
        return self.parts[0].method.backend_for(tokens)

    def compute_for(self, tokens: int) -> str:
        """The `compute` of so many tokens; see `MoEMethod.compute_for`."""
        return self.parts[0].method.compute_for(tokens)

    def explain(self, tokens: int | None = None) -> str:
        """Why that kernel, format by format; see `MoEMethod.explain`."""
        return "\n".join(part.method.explain(tokens) for part in self.parts)

    def __repr__(self) -> str:
        return f"<ExpertLayer {self.names[0]}: {', '.join(repr(part.method) for part in self.parts)}>"


class PlannedPart(NamedTuple):
    """Experts of one format before their tensors are read."""

    form: ExpertForm
    experts: tuple[int, ...]
    method: MoEMethod


def load_experts(
    checkpoint: CheckpointReader,
    record: LayerRecord,
    *,
    device: Device,
    dtype: Dtype,
    compute: Compute,
    top_k: int | None,
    activation: Activation | None,
    experts: Iterable[int] | None,
) -> ExpertLayer:
    """Prepares the experts of a container; see `Checkpoint.load`."""
    check_size(checkpoint, record)
    here = _numbers(experts, record.shape[0])
    options = computed_options(checkpoint, record, top_k, activation)
    try:
        planned = plan_parts(checkpoint, record, here, device=device, dtype=dtype, compute=compute, **options)
    except UnsupportedQuantization as error:
        raise UnsupportedQuantization(f"{error}; {instead_of_running(record)}") from None
    parts = [prepare_part(checkpoint, record, part)[0] for part in planned]
    return ExpertLayer(record.name, parts, here, record.shape[0])


def plan_parts(
    checkpoint: CheckpointReader, record: LayerRecord, experts: Sequence[int], **options: Any
) -> list[PlannedPart]:
    """A method for each format among some experts, without reading a tensor.

    Args:
        checkpoint: where they are.
        record: the container.
        experts: numbers in it.
        **options: of `MoEMethod`, but for what the stored form says.

    Raises:
        UnsupportedQuantization, CheckpointError: the experts cannot run as a layer; see `Checkpoint.load`.
    """
    planned = []
    for form in find_forms(checkpoint, record):
        of_form = set(form.experts)
        here = tuple(number for number in experts if number in of_form)
        if not here:
            continue
        given = options if form.gated else options | dict.fromkeys(SWIGLU)
        about = form.options() | {"num_experts": len(here), "global_num_experts": record.shape[0]}
        try:
            method = MoEMethod(**about, **given)
        except UnsupportedQuantization as error:
            raise UnsupportedQuantization(f"{record.name}: {error}") from None
        _refuse_without_input_scale(checkpoint, record, form)
        planned.append(PlannedPart(form, here, method))
    return planned


def _refuse_without_input_scale(checkpoint: CheckpointReader, record: LayerRecord, form: ExpertForm) -> None:
    """Experts whose activations have one scale have it from the checkpoint, or have none."""
    facts = ALGORITHMS[form.quant_algo]
    if facts.linear != "e4m3_tensor" or facts.by_token:
        return
    parts = [part for part in parts_of(record) if part.quant_algo == form.quant_algo]
    for side in ([part for part in parts if (role_of(part) == "down") == down] for down in (False, True)):
        if not any("input_scale" in part.tensors for part in side):
            raise CheckpointError(
                f"{record.name}: {form.quant_algo} without input_scale in any {role_of(side[0])} projection; "
                "experts quantize activations with one of the checkpoint",
                file=checkpoint.directory,
            )


def prepare_part(
    checkpoint: CheckpointReader, record: LayerRecord, planned: PlannedPart
) -> tuple[ExpertPart, ExpertStacks]:
    """The experts read and prepared, and the stacks that they were prepared from, which share memory."""
    stacks = fill_stacks(checkpoint, record, planned.experts, planned.method)
    _complete_input_scales(checkpoint, record, planned.form, stacks)
    try:
        params = prepare_stacks(planned.method, stacks)
    except UnsupportedQuantization as error:
        raise UnsupportedQuantization(f"{record.name}: {error}") from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{record.name}: {error}", file=checkpoint.directory) from error
    return ExpertPart(planned.experts, planned.method, params), stacks


def _numbers(experts: Iterable[int] | None, count: int) -> Sequence[int]:
    """The experts to load, in the order that was asked for; all are counted only when they are known good."""
    if experts is None:
        return range(count)
    wanted = tuple(int(number) for number in experts)
    if not wanted or len(set(wanted)) < len(wanted) or not 0 <= min(wanted) <= max(wanted) < count:
        raise ValueError(
            f"experts: expected different numbers from 0 to {count - 1}, got {list(wanted)[:16]}"
        )
    return wanted


def computed_options(
    checkpoint: CheckpointReader, record: LayerRecord, top_k: int | None, activation: Activation | None
) -> dict[str, Any]:
    """The arguments of `MoEMethod` that no tensor tells, from the caller or config.json.

    Raises:
        ValueError: neither tells.
        UnsupportedQuantization: config.json names an activation that is not among those of `MoEMethod`.
        CheckpointError: the experts have no gate, where config.json or other layers say that they had one.
    """
    said = read_expert_config(checkpoint.model_config, checkpoint.architectures, record.name)
    if said.unknown and (top_k is None or activation is None):
        raise UnsupportedQuantization(
            f"{record.name}: config.json asks for {said.unknown}, which MoEMethod does not compute; pass "
            "top_k and activation for something else"
        )
    top_k = said.top_k if top_k is None else top_k
    if top_k is None:
        raise ValueError(f"{record.name}: config.json does not say how many experts a token has; pass top_k")
    if why := lost_gate(record, checkpoint.layers(), None if activation is not None else said.activation):
        raise CheckpointError(
            f"{record.name}: {why}; pass activation to run experts without", file=checkpoint.directory
        )
    if activation is None and not is_gated(record) and said.activation is None:
        raise ValueError(
            f"{record.name}: config.json names no activation of experts without a gate; pass one"
        )
    if activation is not None and activation != said.activation:
        return {"top_k": top_k, "activation": activation}
    return {"top_k": top_k, "activation": said.activation or "silu", **said.swiglu}


def _complete_input_scales(
    checkpoint: CheckpointReader, record: LayerRecord, form: ExpertForm, stacks: ExpertStacks
) -> None:
    """Gives experts without an activation scale the largest of the others, as the problem record says.

    Where all experts of a layer share one, it is that of all, wherever they are: so a layer that is spread
    over several processes computes what it does in one.
    """
    shared = ALGORITHMS[form.quant_algo].linear == "e4m3_tensor"
    for name, filled in stacks.filled.items():
        weight, _, role = name.partition("_")
        if role != "input_scale" or (filled.all() and len(filled) == len(form.experts)):
            continue
        known = read_input_scales(checkpoint, record, form.experts, weight)
        if known.size:
            rows = np.full(len(filled), True) if shared else ~filled.any(axis=1)
            stacks[name][rows] = known.max()
            filled[rows] = True


def prepare_stacks(method: MoEMethod, stacks: ExpertStacks) -> Mapping[str, Any]:
    """The prepared stacks; those whose bytes stay as they are keep their memory.

    On a CUDA device that is the memory that codes were copied to, and only where all of them stay: packed
    ones are written beside what they are packed from.
    """
    there = {name for name, filled in stacks.filled.items() if filled.any()}
    wanted = {name: spec for name, spec in method.prepared_params.items() if spec.required or name in there}
    kept = {name for name in wanted if method.keeps(name)}
    if method.device != "cpu":
        codes = {name for name in there if method.checkpoint_params[name].dtype != "float32"}
        stacks = ExpertStacks(stacks | {name: _beside(stacks[name], method) for name in codes}, stacks.filled)
        if any(spec.dtype != "float32" and name not in kept for name, spec in wanted.items()):
            return method.prepare(stacks)
    out = {name: stacks[name] if name in kept else _room(method, spec) for name, spec in wanted.items()}
    return method.prepare(stacks, out)


def _room(method: MoEMethod, spec: ParamSpec) -> Any:
    """Memory for a prepared stack."""
    return _beside(np.empty(spec.shape, np.float32 if spec.dtype == "float32" else np.uint8), method)


def _beside(array: NDArray[Any], method: MoEMethod) -> Any:
    """The array in memory of the method's device."""
    return array if method.device == "cpu" else to_device(np.ascontiguousarray(array), method.device)
