"""Finds out what a module of experts computes between its two products, by trying it.

Models write the same few functions in many ways: a module or a plain function, clamps in front of it, gate
and up behind one another or in turns. Their values tell which it is, and their names do not.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu2": lambda x: torch.nn.functional.relu(x).square(),
}
_ALPHA = 1.702
"""Factor of gpt-oss, and of models that write it as a number."""


class Gate(NamedTuple):
    """Function between the two products of an expert.

    Attributes:
        options: arguments of `QuantMoE`: the activation, with alpha, beta and limit where they matter.
        interleaved: whether the model's own rows of gate and up take turns.
    """

    options: dict[str, Any]
    interleaved: bool


class _Swiglu(NamedTuple):
    """gate * sigmoid(alpha * gate) * (up + beta), both clamped."""

    alpha: float
    beta: float
    limit: float | None

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)

    def options(self) -> dict[str, Any]:
        """The arguments of `QuantMoE`."""
        if self.beta == 1 and self.limit is not None:
            return {"activation": "swigluoai", "alpha": self.alpha, "limit": self.limit}
        given = {"alpha": self.alpha, "beta": self.beta, "limit": self.limit}
        return {"activation": "silu"} | {name: value for name, value in given.items() if value is not None}


def find_activation(function: Any) -> str | None:
    """The activation of `QuantMoE` that a module or function is, None for another one."""
    x = _samples([])
    found = _try(function, x)
    return next((name for name, known in _FUNCTIONS.items() if _agree(found, known(x))), None)


def find_gate(module: Any) -> Gate | None:
    """Tries a module that has an `_apply_gate`; None where `QuantMoE` has no such function.

    Args:
        module: on any device; its clamps and factors are numbers among its attributes.
    """
    settings = {name: float(value) for name, value in vars(module).items() if _is_number(value)}
    limits = [value for name, value in settings.items() if "limit" in name and 0 < value < 1e30]
    alphas = [value for name, value in settings.items() if "alpha" in name]
    samples = _samples(limits)
    gate, up = torch.cartesian_prod(samples, samples).unflatten(0, (-1, 2)).unbind(-1)
    together = torch.cat([gate, up], -1), torch.stack([gate, up], -1).flatten(-2)
    found = [_try(module._apply_gate, rows) for rows in together]
    for options, expected in _known(gate, up, [1.0, _ALPHA, *alphas], limits):
        for interleaved, values in enumerate(found):
            if _agree(values, expected):
                return Gate(options, bool(interleaved))
    return None


def _known(
    gate: torch.Tensor, up: torch.Tensor, alphas: list[float], limits: list[float]
) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Yields what experts of `QuantMoE` may have between their products, the plain first, and its values."""
    for name, function in _FUNCTIONS.items():
        yield {"activation": name}, function(gate) * up
    for limit in (None, *limits):
        for alpha in alphas:
            for beta in (0.0, 1.0):
                swiglu = _Swiglu(alpha, beta, limit)
                yield swiglu.options(), swiglu(gate, up)


def _samples(limits: list[float]) -> torch.Tensor:
    """Values of both signs, an even number of them, on both sides of limits."""
    beyond = [factor * limit for limit in limits for factor in (-1.5, -0.5, 0.5, 1.5)]
    return torch.cat(
        [
            torch.linspace(-24, 24, 62, dtype=torch.float64, device="cpu"),
            torch.tensor(beyond, dtype=torch.float64, device="cpu"),
        ]
    )


@torch.no_grad()
def _try(function: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Calls a model's function; None where it cannot take the values."""
    try:
        y = function(x.clone())
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    return y if isinstance(y, torch.Tensor) and y.device == x.device else None


def _agree(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Whether values are the same, in float32 at least."""
    return (
        found is not None
        and found.shape == expected.shape
        and torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-6)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
