"""Calls of experts wherever they run: what tests hand over and get back are arrays of the host."""

from typing import Any

import numpy as np
import pytest

from moqext import _C, MoEMethod, UnsupportedQuantization, reference
from moqext.tools.expert_slack import rounds_d, sums_in_cores

from .linear_cases import poisoned
from .moe_cases import assert_experts_close

MODELS = {
    "Qwen3-30B-A3B": (128, 2048, 768, 8),
    "Qwen3-235B-A22B": (128, 4096, 1536, 8),
    "Mixtral-8x7B": (8, 4096, 14336, 2),
    "DeepSeek-V3, TP8": (256, 7168, 256, 8),
    "DeepSeek-V3, EP8": (32, 7168, 2048, 8),
    "Llama-4-Maverick": (128, 5120, 8192, 1),
    "Nemotron-3-Nano": (128, 2688, 1856, 6),
    "gpt-oss-120b": (128, 2880, 2880, 4),
    "Qwen3-Next-80B-A3B": (512, 2048, 512, 10),
}
"""Layers of models: experts, hidden size, intermediate size, top k."""


def plan(
    algo: str,
    *sizes: int,
    dtype: str = "bfloat16",
    compute: str = "exact",
    chip: str = "9.0",
    of_all: int | None = None,
    activation: str = "silu",
    gated: bool = True,
) -> Any:
    """The plan of a layer on a chip that need not be here; `of_all` experts are on all ranks."""
    kind = (activation, gated, None, dtype, "cuda:0", compute)
    return _C.moe_plan(algo, *sizes, *kind, of_all, None, None, None, False, chip)


def layer_of(monkeypatch: pytest.MonkeyPatch, kernel: str, *sizes: Any, **options: Any) -> MoEMethod:
    """A layer that the kernel runs; skips the test where the device is another, or the layer is not its."""
    monkeypatch.setenv("MOQEXT_KERNEL", kernel)
    try:
        method = MoEMethod(*sizes, device="cuda:0", **options)
    except UnsupportedQuantization as error:
        pytest.skip(str(error))
    assert method.backend == kernel
    return method


def options_of(method: MoEMethod) -> dict[str, Any]:
    """Options of the reference for a layer."""
    names = ("activation", "gated", "interleaved", "alpha", "beta", "limit", "group_size", "compute", "dtype")
    return {name: getattr(method, name) for name in names} | {"quant_algo": method.quant_algo}


def as_values(stored: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers of an array of a layer's dtype."""
    return reference.as_float32(stored) if dtype != "float32" else np.asarray(stored, np.float32)


def moved(method: MoEMethod, array: Any, dtype: str | None = None) -> Any:
    """An array where the layer is: itself, or a tensor of torch."""
    if array is None or method.device == "cpu":
        return array
    from .cuda.cases import to_cuda  # wants torch

    return to_cuda(array, dtype)


def prepared(method: MoEMethod, stacks: dict[str, np.ndarray]) -> Any:
    """Prepared tensors where the layer is, from stacks of the host."""
    return method.prepare({name: moved(method, stack) for name, stack in stacks.items()})


def moved_inputs(method: MoEMethod, x: Any, params: Any, weights: Any, ids: Any) -> tuple[Any, Any, Any, Any]:
    """The inputs of a call where the layer is; the parameters are there already."""
    return moved(method, x, method.dtype), params, moved(method, weights), moved(method, ids)


def run(method: MoEMethod, params: Any, x: Any, weights: Any, ids: Any, **options: Any) -> np.ndarray:
    """y into a poisoned output, or into `out`, of prepared experts."""
    out = options.pop("out", None)
    result = poisoned(x.shape, method.dtype) if out is None else out
    target = moved(method, result, method.dtype)
    if "expert_map" in options:
        options["expert_map"] = moved(method, options["expert_map"])
    assert method(*moved_inputs(method, x, params, weights, ids), out=target, **options) is target
    if method.device != "cpu":
        from .cuda.cases import to_numpy

        result[...] = to_numpy(target)
    return result


def call(
    method: MoEMethod, stacks: dict[str, np.ndarray], x: Any, weights: Any, ids: Any, **options: Any
) -> np.ndarray:
    """y of the stacks of a checkpoint."""
    return run(method, prepared(method, stacks), x, weights, ids, **options)


def check(y: Any, method: MoEMethod, stacks: Any, x: Any, weights: Any, ids: Any, **options: Any) -> None:
    """The contract of outputs, beyond what the rounding of g leaves undecided."""
    values = as_values(x, method.dtype)
    kernel = method.backend_for(len(x))
    of_kernel = {"in_cores": sums_in_cores(kernel), "rounded": rounds_d(kernel, method.dtype)}
    assert_experts_close(y, values, stacks, weights, ids, **options_of(method), **of_kernel | options)


def check_on_two_streams(method: MoEMethod, every_inputs: list[Any], rounds: int) -> None:
    """Calls whose kernels run beside each other's have the bits that each has alone."""
    torch = pytest.importorskip("torch")
    calls = [(inputs, method(*inputs), torch.cuda.Stream(), []) for inputs in every_inputs]
    torch.cuda.synchronize()
    for _ in range(rounds):
        for inputs, _, stream, results in calls:
            with torch.cuda.stream(stream):
                results.append(method(*inputs))
    torch.cuda.synchronize()
    for _, expected, _, results in calls:
        assert all(torch.equal(result, expected) for result in results)
