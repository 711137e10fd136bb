"""Experts of a model: which module has them, how it wants to be called, and the quantized one in its place.

Models keep all experts of a layer in one module with 3-D weights, called with the tokens, the experts chosen
for each and what they weigh: the interface of Transformers from version 5 on. The router stays the model's.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from moqext import Checkpoint, LayerRecord, UnsupportedQuantization
from moqext_torch.quant_moe import QuantMoE, refuse_unfit_experts, stored_roles

_ACTIVATIONS = {  # classes of modules that compute one
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}
_INTERFACE = "transformers.integrations.moe"
"""Where the gate of experts that have none of their own is defined: act(gate) * up."""


class QuantExperts(torch.nn.Module):
    """Experts of a model, called as it calls its own, with a `QuantMoE` inside.

    Args:
        moe: the experts.
    """

    def __init__(self, moe: QuantMoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """What the chosen experts give, weighted and summed.

        Args:
            hidden_states: [tokens, hidden_size].
            top_k_index: integers [tokens, top_k]; one outside of the experts counts nothing.
            top_k_weights: floats [tokens, top_k].
        """
        return self.moe(hidden_states, top_k_weights.float(), top_k_index)


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
        experts = QuantExperts(moe)
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
        found[name] = _place(name, record, module, by_name.get(name.rpartition(".")[0]) if name else None)
        wrong += _misfits(record, module)
    return found, wrong


def _place(name: str, record: LayerRecord, module: Any, parent: torch.nn.Module | None) -> ExpertsPlace:
    """How a module of experts works.

    Raises:
        UnsupportedQuantization: it works in another way than `MoEMethod` can.
    """
    kind = type(module).__name__
    weights_on_input = kind == "Llama4TextExperts" and type(parent).__name__ == "Llama4TextMoe"
    if kind == "GptOssExperts":
        options = {"activation": "swigluoai", "alpha": module.alpha, "limit": module.limit}
    elif weights_on_input or _has_the_usual_gate(module):
        act_fn = type(module.act_fn).__name__
        if act_fn not in _ACTIVATIONS:
            raise UnsupportedQuantization(f"{record.name}: no experts with the activation {act_fn}")
        options = {"activation": _ACTIVATIONS[act_fn]}
    else:
        raise UnsupportedQuantization(
            f"{record.name}: {record.shape[0]} experts ({record.quant_algo}), and {kind} in the model is no "
            "module of experts that moqext knows how to call"
        )
    together = any(projection.role == "gate_up" for projection in record.projections)
    takes_turns = kind == "GptOssExperts" or not getattr(module, "is_concatenated", True)
    options["interleaved"] = together and takes_turns  # what the record has is a guess by architectures
    options["top_k"] = 1 if weights_on_input else _top_k(record, module, parent)
    return ExpertsPlace(name, record, options, weights_on_input, module.down_proj)


def _has_the_usual_gate(module: Any) -> bool:
    """Whether the module's class has the interface for experts, and no gate or norm of its own in it."""
    gate = getattr(type(module), "_apply_gate", None)
    return (
        hasattr(module, "has_gate")
        and hasattr(module, "act_fn")
        and getattr(gate, "__module__", None) == _INTERFACE
        and not getattr(module, "has_post_expert_norm", False)
    )


def _top_k(record: LayerRecord, module: Any, parent: torch.nn.Module | None) -> int:
    """Experts of a token, where configurations and blocks say it."""
    for holder, name in ((getattr(module, "config", None), "num_experts_per_tok"), (parent, "top_k")):
        if isinstance(top_k := getattr(holder, name, None), int):
            return top_k
    raise UnsupportedQuantization(
        f"{record.name}: neither the configuration nor the model says how many experts a token has"
    )


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
