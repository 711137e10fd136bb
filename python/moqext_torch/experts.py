"""Experts of a model: which module has them, how it wants to be called, and the quantized one in its place.

Models keep all experts of a layer in one module with 3-D weights, called with the tokens, the experts chosen
for each and what they weigh: the interface of Transformers from version 5 on. The router stays the model's.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from moqext import Checkpoint, LayerRecord, UnsupportedQuantization
from moqext.reader.config.expert_config import TOP_K_NAMES, read_expert_config, read_top_k
from moqext_torch.gates import Gate, find_activation, find_gate
from moqext_torch.quant_moe import QuantMoE, refuse_unfit_experts, stored_roles

_ALIKE = ("LongcatFlashExperts", "Step3p7Experts")
"""Modules without the interface of Transformers that are called as it is."""


class QuantExperts(torch.nn.Module):
    """Experts of a model, called as it calls its own, with a `QuantMoE` inside.

    Args:
        moe: the experts.
        replaced: the module in whose place it is put. Its tensors stay attributes by name, on the meta device
            and marked as loaded: initializers of models ask for them.
    """

    def __init__(self, moe: QuantMoE, replaced: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.moe = moe
        tensors = {} if replaced is None else {**replaced._parameters, **replaced._buffers}
        for name, tensor in tensors.items():
            if tensor is not None:
                stand_in = torch.empty_like(tensor, device="meta")
                stand_in._is_hf_initialized = True  # type: ignore[attr-defined]
                setattr(self, name, stand_in)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Runs the chosen experts of each token, and sums their outputs by weight.

        Args:
            hidden_states: [tokens, hidden_size].
            top_k_index: integers [tokens, top_k]; one outside of the experts counts nothing.
            top_k_weights: floats [tokens, top_k].
        """
        return self.moe(hidden_states, top_k_weights.float(), top_k_index)


class QuantExpertsOrIdentity(QuantExperts):
    """Experts of LongCat-Flash: those behind the last that has weights give back what they are given."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Runs `QuantExperts`, with the identity for an index behind all experts."""
        routed = super().forward(hidden_states, top_k_index, top_k_weights)
        kept = top_k_weights * (top_k_index >= self.moe.description.num_experts)
        return routed + (hidden_states * kept.sum(-1, keepdim=True)).to(routed.dtype)


class InputWeightedExperts(torch.nn.Module):
    """The block of Llama 4: weights multiply what goes into experts, and a shared expert is added.

    The model's own runs every expert on every token, nearly all of them on zeros; this one, the chosen.

    Args:
        block: the model's own, whose router and shared expert go on to be used.
        experts: with a top_k of one: a token with several experts counts as several.
    """

    def __init__(self, block: torch.nn.Module, experts: QuantExperts) -> None:
        super().__init__()
        self.top_k = block.top_k
        self.experts = experts
        self.router = block.router
        self.shared_expert = block.shared_expert

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [tokens, hidden_size] and the router's logits, as the model's own block gives them."""
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(hidden_states)
        chosen = logits.topk(self.top_k, dim=1).indices
        weights = scores.gather(1, chosen).float().reshape(-1, 1)
        routed = self.experts.moe(
            hidden_states.repeat_interleave(self.top_k, dim=0),
            weights,
            chosen.reshape(-1, 1),
            apply_router_weight_on_input=True,
        )
        routed = routed.reshape(-1, self.top_k, hidden_states.shape[-1]).sum(dim=1)
        return self.shared_expert(hidden_states) + routed, logits


class ExpertsPlace(NamedTuple):
    """Experts of a model that a checkpoint holds quantized.

    Attributes:
        name: the module with all experts, in the model.
        record: what they are in the checkpoint.
        options: arguments of `QuantMoE` that the model tells: top_k, the activation and its numbers, and how
            gate and up lie in one tensor.
        weights_on_input: whether the block around them is Llama 4's.
        weight: a weight of the module, for its dtype and device.
    """

    name: str
    record: LayerRecord
    options: Mapping[str, Any]
    weights_on_input: bool
    weight: torch.Tensor

    def install(self, model: torch.nn.Module, moe: QuantMoE) -> torch.nn.Module:
        """Puts quantized experts in the place; returns the model, or what is in its place."""
        replaced = model.get_submodule(self.name)
        has_identities = bool(getattr(replaced, "zero_expert_num", 0))
        experts = (QuantExpertsOrIdentity if has_identities else QuantExperts)(moe, replaced)
        parent = self.name.rpartition(".")[0]
        put: torch.nn.Module = experts
        where = self.name
        if self.weights_on_input:
            put, where = InputWeightedExperts(model.get_submodule(parent), experts), parent
        put.training = moe.training = experts.training = model.training
        if not where:
            return put
        model.set_submodule(where, put)
        return model


def find_experts(
    checkpoint: Checkpoint,
    modules: Mapping[str, tuple[str, torch.nn.Module]],
    layers: Iterable[LayerRecord],
) -> tuple[dict[str, ExpertsPlace], list[str]]:
    """The groups of experts of a checkpoint that are one module of a model.

    Those that are an `nn.Linear` each, or not in the model at all, are left out.

    Args:
        checkpoint: where they are stored.
        modules: of the model, with their names in it, by the names that they have in the checkpoint.
        layers: of the checkpoint.

    Returns:
        The places by their names in the model, and lines about what does not fit.

    Raises:
        UnsupportedQuantization: experts that do not run: several formats in one layer, a module that is
            called in a way of its own, an activation that there is not.
        CheckpointError: a problem of severity "error" stands against experts.
    """
    by_name = dict(modules.values())
    found: dict[str, ExpertsPlace] = {}
    wrong: list[str] = []
    for record in layers:
        name, module = modules.get(record.name, ("", None))
        apart = any(member.name in modules for member in record.members)
        if record.kind != "moe" or module is None or apart:
            continue
        refuse_unfit_experts(checkpoint, record)
        parent = by_name.get(name.rpartition(".")[0]) if name else None
        found[name] = _place(checkpoint, name, record, module, parent)
        wrong += _misfits(record, module)
    return found, wrong


def _place(
    checkpoint: Checkpoint, name: str, record: LayerRecord, module: Any, parent: torch.nn.Module | None
) -> ExpertsPlace:
    """How a module of experts works.

    Raises:
        UnsupportedQuantization: it works in another way than `MoEMethod` can.
    """
    kind = type(module).__name__
    weights_on_input = kind == "Llama4TextExperts" and type(parent).__name__ == "Llama4TextMoe"
    if not (weights_on_input or _is_called_as_usual(module)):
        raise UnsupportedQuantization(
            f"{record.name}: {record.shape[0]} experts ({record.quant_algo}), and {kind} in the model is no "
            "module of experts that moqext knows how to call"
        )
    gate = _gate_of(record, module)
    options = dict(gate.options)
    together = any(projection.role == "gate_up" for projection in record.projections)
    options["interleaved"] = together and gate.interleaved  # what the record has is a guess by architectures
    options["top_k"] = 1 if weights_on_input else _top_k(checkpoint, record, module, parent)
    return ExpertsPlace(name, record, options, weights_on_input, module.down_proj)


def _is_called_as_usual(module: Any) -> bool:
    """Whether the module's class has the interface for experts, and no norm of its own in it."""
    usual = hasattr(module, "has_gate") or type(module).__name__ in _ALIKE
    return usual and not getattr(module, "has_post_expert_norm", False)


def _gate_of(record: LayerRecord, module: Any) -> Gate:
    """Returns what the module computes between its two products.

    Raises:
        UnsupportedQuantization: it is none of what `QuantMoE` has.
    """
    function = getattr(module, "act_fn", None)
    if getattr(module, "has_gate", True) and hasattr(module, "_apply_gate"):
        found = find_gate(module)
    else:
        activation = find_activation(function)
        found = None if activation is None else Gate({"activation": activation}, False)
    if found is None:
        name = getattr(function, "__name__", type(function).__name__)
        what = f"the activation {name}" if function is not None else f"the gate of {type(module).__name__}"
        raise UnsupportedQuantization(f"{record.name}: no experts with {what}")
    return found


def _top_k(checkpoint: Checkpoint, record: LayerRecord, module: Any, parent: torch.nn.Module | None) -> int:
    """Experts of a token, as the model's configuration, the block or the checkpoint's says.

    Raises:
        UnsupportedQuantization: none of them does.
    """
    config = getattr(module, "config", None)
    told = {name: getattr(config, name, None) for name in TOP_K_NAMES}
    top_k = read_top_k(told, record.name) or getattr(parent, "top_k", None)
    if not isinstance(top_k, int):
        said = read_expert_config(checkpoint.model_config, checkpoint.architectures, record.name)
        top_k = said.top_k
    if top_k is None:
        raise UnsupportedQuantization(
            f"{record.name}: neither the configuration nor the model says how many experts a token has"
        )
    return top_k


def _misfits(record: LayerRecord, module: Any) -> Iterator[str]:
    """Why a module cannot be what the checkpoint holds."""
    experts, hidden, intermediate = record.shape
    shape = tuple(module.down_proj.shape)
    transposed = getattr(module, "is_transposed", False) or type(module).__name__ == "Llama4TextExperts"
    expected = (experts, intermediate, hidden) if transposed else (experts, hidden, intermediate)
    if shape != expected:
        yield f"{record.name}: down of {list(expected)} in the checkpoint, {list(shape)} in the model"
    roles = stored_roles(record)
    found = {"a gate": any(role.startswith("gate") for role in roles)}
    found["biases"] = any("bias" in kinds for kinds in roles.values())
    in_model = {"a gate": hasattr(module, "gate_up_proj"), "biases": getattr(module, "has_bias", False)}
    for what, stored in found.items():
        if stored != in_model[what]:
            yield f"{record.name}: {what} in the {'checkpoint' if stored else 'model'} alone"
