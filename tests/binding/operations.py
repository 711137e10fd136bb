"""Every public operation that takes tensors, with arguments that are right: a table for boundary tests."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from fake_dlpack import CPU, Exchange, Lender, MutableProducer, make_type

from moqext import LinearMethod, MoEMethod, ops

Arguments = dict[str, Any]
Slot = tuple[str, ...]
"""Place of a tensor: ("x",), ("params", "weight")."""


@dataclass
class Operation:
    """One operation with arguments that fit it. Outputs are given, so that a test sees what is written."""

    call: Callable[[Arguments], Any]
    arguments: Arguments
    outputs: tuple[str, ...] = ("out",)

    def slots(self) -> Iterator[Slot]:
        """The places of tensors."""
        for name, value in self.arguments.items():
            if isinstance(value, dict):
                yield from ((name, key) for key in value)
            else:
                yield (name,)

    def get(self, slot: Slot) -> np.ndarray:
        value: Any = self.arguments
        for key in slot:
            value = value[key]
        return value

    def run(self, replaced: dict[Slot, Any] | None = None) -> Any:
        """Calls with the tensors of some slots replaced."""
        arguments = {
            name: dict(value) if isinstance(value, dict) else value for name, value in self.arguments.items()
        }
        for slot, tensor in (replaced or {}).items():
            if len(slot) == 2:
                arguments[slot[0]][slot[1]] = tensor
            else:
                arguments[slot[0]] = tensor
        return self.call(arguments)

    def is_output(self, slot: Slot) -> bool:
        return slot[0] in self.outputs

    def results(self) -> list[bytes]:
        """The bytes of all outputs."""
        return [self.get(slot).tobytes() for slot in self.slots() if self.is_output(slot)]


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def e4m3(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Codes that are numbers."""
    return rng.integers(0, 0x7F, shape, dtype=np.uint8)


def scale(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.exp2(rng.uniform(-4, 4, shape)).astype(np.float32)


def poison(*shape: int, dtype: Any = np.uint8) -> np.ndarray:
    return (
        np.frombuffer(b"\xa5" * int(np.prod(shape) * np.dtype(dtype).itemsize), dtype).reshape(shape).copy()
    )


def encode(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.encode(a["x"], "e4m3", a["out"])  # noqa: E731
    return Operation(call, {"x": floats(rng, 3, 8), "out": poison(3, 8)})


def decode(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.decode(a["codes"], "e2m1", a["out"])  # noqa: E731
    return Operation(call, {"codes": e4m3(rng, 3, 8), "out": poison(3, 16, dtype=np.float32)})


def quantize(scheme: str, scales: tuple[int, ...] | None) -> Callable[[np.random.Generator], Operation]:
    def make(rng: np.random.Generator) -> Operation:
        nvfp4 = scheme.startswith("nvfp4")
        arguments = {"x": floats(rng, 3, 32), "out": poison(3, 16 if nvfp4 else 32)}
        if scales is None or nvfp4:
            arguments["scale"] = scale(rng, 1)
        if scales is not None:
            arguments["scale_out"] = poison(*scales, dtype=np.uint8 if nvfp4 else np.float32)
        return Operation(
            lambda a: ops.quantize(
                a["x"], scheme, scale=a.get("scale"), out=a["out"], scale_out=a.get("scale_out")
            ),
            arguments,
            ("out", "scale_out"),
        )

    return make


def silu_and_mul(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.silu_and_mul_quantize(a["x"], "fp8_token", out=a["out"], scale_out=a["scale_out"])  # noqa: E731
    arguments = {"x": floats(rng, 3, 64), "out": poison(3, 32), "scale_out": poison(3, 1, dtype=np.float32)}
    return Operation(call, arguments, ("out", "scale_out"))


def rms_norm(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.rms_norm_quantize(  # noqa: E731
        a["x"],
        a["weight"],
        1e-6,
        "fp8_tensor",
        residual=a["residual"],
        scale=a["scale"],
        out=a["out"],
        residual_out=a["residual_out"],
    )
    arguments = {"x": floats(rng, 3, 32), "weight": floats(rng, 32), "residual": floats(rng, 3, 32)}
    arguments |= {"scale": scale(rng, 1), "out": poison(3, 32)}
    arguments |= {"residual_out": poison(3, 32, dtype=np.float32)}
    return Operation(call, arguments, ("out", "residual_out"))


def silu_and_mul_values(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.silu_and_mul(a["x"], out=a["out"])  # noqa: E731
    return Operation(call, {"x": floats(rng, 3, 64), "out": poison(3, 32, dtype=np.float32)})


def rms_norm_values(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.rms_norm(  # noqa: E731
        a["x"], a["weight"], 1e-6, residual=a["residual"], out=a["out"], residual_out=a["residual_out"]
    )
    arguments = {"x": floats(rng, 3, 32), "weight": floats(rng, 32), "residual": floats(rng, 3, 32)}
    outputs = {name: poison(3, 32, dtype=np.float32) for name in ("out", "residual_out")}
    return Operation(call, arguments | outputs, ("out", "residual_out"))


def rotary(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.rotary_embedding(a["x"], a["cos"], a["sin"], out=a["out"])  # noqa: E731
    arguments = {"x": floats(rng, 2, 3, 4, 8), "cos": floats(rng, 2, 3, 8), "sin": floats(rng, 2, 3, 8)}
    return Operation(call, arguments | {"out": poison(2, 3, 4, 8, dtype=np.float32)})


def dequantize_fp8(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.dequantize(a["weight"], "FP8", weight_scale=a["weight_scale"], out=a["out"])  # noqa: E731
    arguments = {"weight": e4m3(rng, 4, 32), "weight_scale": scale(rng, 4)}
    return Operation(call, arguments | {"out": poison(4, 32, dtype=np.float32)})


def dequantize_nvfp4(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.dequantize(  # noqa: E731
        a["weight"],
        "NVFP4",
        weight_scale=a["weight_scale"],
        weight_scale_2=a["weight_scale_2"],
        out=a["out"],
    )
    arguments = {
        "weight": e4m3(rng, 4, 16),
        "weight_scale": e4m3(rng, 4, 2),
        "weight_scale_2": scale(rng, 1),
        "out": poison(4, 32, dtype=np.float32),
    }
    return Operation(call, arguments)


def requantize(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.requantize_to_max(a["weight"], a["weight_scale"], [1, 3], out=a["out"])  # noqa: E731
    return Operation(call, {"weight": e4m3(rng, 4, 8), "weight_scale": scale(rng, 2), "out": poison(4, 8)})


def requantize_stack(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.requantize_to_max(a["weight"], a["weight_scale"], [1, 1], out=a["out"])  # noqa: E731
    arguments = {"weight": e4m3(rng, 3, 2, 8), "weight_scale": scale(rng, 3, 2), "out": poison(3, 2, 8)}
    return Operation(call, arguments)


def swap_gate_up(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.swap_gate_up(a["stack"], out=a["out"])  # noqa: E731
    return Operation(call, {"stack": e4m3(rng, 3, 4, 5), "out": poison(3, 4, 5)})


def expert_input_scale(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.expert_input_scale(a["input_scale"], out=a["out"])  # noqa: E731
    return Operation(call, {"input_scale": scale(rng, 3, 2), "out": poison(3, dtype=np.float32)})


def shared_input_scale(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.shared_input_scale(a["input_scale"], (4,), out=a["out"])  # noqa: E731
    return Operation(call, {"input_scale": scale(rng, 3, 2), "out": poison(4, dtype=np.float32)})


def expert_alphas(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.expert_alphas(  # noqa: E731
        a["input_scale"], a["weight_scale_2"], out=a["out"], scale_out=a["scale_out"]
    )
    arguments = {
        "input_scale": scale(rng, 3),
        "weight_scale_2": scale(rng, 3, 2),
        "out": poison(3, dtype=np.float32),
        "scale_out": poison(3, dtype=np.float32),
    }
    return Operation(call, arguments, ("out", "scale_out"))


def swizzle(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.swizzle_block_scales(a["scale"], out=a["out"])  # noqa: E731
    return Operation(call, {"scale": e4m3(rng, 3, 5), "out": poison(128, 8)})


def unswizzle(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.unswizzle_block_scales(a["swizzled"], (3, 5), out=a["out"])  # noqa: E731
    return Operation(call, {"swizzled": e4m3(rng, 128, 8), "out": poison(3, 5)})


def pack(rng: np.random.Generator) -> Operation:
    return Operation(
        lambda a: ops.pack_fp4(a["codes"], out=a["out"]), {"codes": e4m3(rng, 3, 8), "out": poison(3, 4)}
    )


def unpack(rng: np.random.Generator) -> Operation:
    return Operation(
        lambda a: ops.unpack_fp4(a["packed"], out=a["out"]), {"packed": e4m3(rng, 3, 4), "out": poison(3, 8)}
    )


def pack_nvfp4(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.pack_nvfp4(a["weight"], a["weight_scale"], out=a["out"])  # noqa: E731
    arguments = {"weight": e4m3(rng, 3, 16), "weight_scale": e4m3(rng, 3, 2), "out": poison(4, 1, 576)}
    return Operation(call, arguments)


def unpack_nvfp4(rng: np.random.Generator) -> Operation:
    call = lambda a: ops.unpack_nvfp4(a["packed"], (3, 32), out=a["out"], scale_out=a["scale_out"])  # noqa: E731
    arguments = {"packed": e4m3(rng, 4, 1, 576), "out": poison(3, 16), "scale_out": poison(3, 2)}
    return Operation(call, arguments, ("out", "scale_out"))


def route(rng: np.random.Generator) -> Operation:
    return Operation(
        lambda a: ops.route(
            a["router_logits"],
            2,
            scoring="sigmoid",
            correction_bias=a["correction_bias"],
            out=(a["out"]["0"], a["out"]["1"]),
        ),
        {
            "router_logits": floats(rng, 3, 8),
            "correction_bias": floats(rng, 8),
            "out": {"0": poison(3, 2, dtype=np.float32), "1": poison(3, 2, dtype=np.int32)},
        },
    )


LAYERS = {"FP8": (32, [3, 2]), "FP8_PB_WO": (130, [3, 2]), "NVFP4": (32, [3, 2])}
"""Algorithm -> in_features, out_partitions."""


def layer(rng: np.random.Generator, algo: str) -> tuple[LinearMethod, dict[str, np.ndarray]]:
    """A method and checkpoint tensors for it, every optional one included."""
    method = LinearMethod(algo, *LAYERS[algo], dtype="float32")
    params = {}
    for name, spec in method.checkpoint_params.items():
        if spec.dtype == "float32":
            params[name] = scale(rng, *spec.shape)
        else:
            params[name] = e4m3(rng, *spec.shape)
    return method, params


def prepare(algo: str) -> Callable[[np.random.Generator], Operation]:
    def make(rng: np.random.Generator) -> Operation:
        method, params = layer(rng, algo)
        out = {
            name: poison(*spec.shape, dtype=np.float32 if spec.dtype == "float32" else np.uint8)
            for name, spec in method.prepared_params.items()
        }
        return Operation(lambda a: method.prepare(a["params"], a["out"]), {"params": params, "out": out})

    return make


def linear(algo: str) -> Callable[[np.random.Generator], Operation]:
    def make(rng: np.random.Generator) -> Operation:
        method, params = layer(rng, algo)
        arguments = {
            "x": floats(rng, 2, method.in_features),
            "params": dict(method.prepare(params)),
            "bias": floats(rng, method.out_features),
            "out": poison(2, method.out_features, dtype=np.float32),
        }
        return Operation(lambda a: method(a["x"], a["params"], a["bias"], a["out"]), arguments)

    return make


def linear_function(rng: np.random.Generator) -> Operation:
    operation = linear("NVFP4")(rng)
    operation.call = lambda a: ops.linear(a["x"], a["params"], "NVFP4", [3, 2], bias=a["bias"], out=a["out"])
    return operation


def experts(rng: np.random.Generator, algo: str, **options: Any) -> tuple[MoEMethod, dict[str, np.ndarray]]:
    """A method of three experts, top 2, and checkpoint stacks for it, every optional one included."""
    method = MoEMethod(algo, 3, 32, 64, top_k=2, dtype="float32", global_num_experts=4, **options)
    params = {
        name: scale(rng, *spec.shape) if spec.dtype == "float32" else e4m3(rng, *spec.shape)
        for name, spec in method.checkpoint_params.items()
    }
    return method, params


def prepare_experts(algo: str) -> Callable[[np.random.Generator], Operation]:
    def make(rng: np.random.Generator) -> Operation:
        method, params = experts(rng, algo)
        out = {
            name: poison(*spec.shape, dtype=np.float32 if spec.dtype == "float32" else np.uint8)
            for name, spec in method.prepared_params.items()
        }
        return Operation(lambda a: method.prepare(a["params"], a["out"]), {"params": params, "out": out})

    return make


def moe(algo: str) -> Callable[[np.random.Generator], Operation]:
    def make(rng: np.random.Generator) -> Operation:
        method, params = experts(rng, algo)
        call = lambda a: method(  # noqa: E731
            a["x"], a["params"], a["topk_weights"], a["topk_ids"], a["expert_map"], out=a["out"]
        )
        arguments = {
            "x": floats(rng, 2, 32),
            "params": dict(method.prepare(params)),
            "topk_weights": floats(rng, 2, 2),
            "topk_ids": rng.integers(-1, 5, (2, 2), dtype=np.int32),
            "expert_map": np.array([2, -1, 0, 1], np.int32),
            "out": poison(2, 32, dtype=np.float32),
        }
        return Operation(call, arguments)

    return make


def moe_of_codes(rng: np.random.Generator) -> Operation:
    """Tokens come as pairs of e2m1 with a scale for each 16."""
    method, params = experts(rng, "NVFP4", compute="fp4", quantized_input=True)
    call = lambda a: method(  # noqa: E731
        a["x"], a["params"], a["topk_weights"], a["topk_ids"], a["expert_map"], out=a["out"],
        x_scale=a["x_scale"],
    )  # fmt: skip
    arguments = moe("NVFP4")(rng).arguments | {
        "x": rng.integers(0, 256, (2, 16), dtype=np.uint8),
        "x_scale": e4m3(rng, 2, 2),
        "params": dict(method.prepare(params)),
    }
    return Operation(call, arguments)


OPERATIONS: dict[str, Callable[[np.random.Generator], Operation]] = {
    "encode": encode,
    "decode": decode,
    "quantize fp8_tensor": quantize("fp8_tensor", ()),
    "quantize fp8_tensor, scale given": quantize("fp8_tensor", None),
    "quantize fp8_token": quantize("fp8_token", (3, 1)),
    "quantize fp8_group": quantize("fp8_group", (3, 1)),
    "quantize nvfp4": quantize("nvfp4", (3, 2)),
    "quantize nvfp4_swizzled": quantize("nvfp4_swizzled", (128, 4)),
    "silu_and_mul_quantize": silu_and_mul,
    "rms_norm_quantize": rms_norm,
    "silu_and_mul": silu_and_mul_values,
    "rms_norm": rms_norm_values,
    "rotary_embedding": rotary,
    "dequantize FP8": dequantize_fp8,
    "dequantize NVFP4": dequantize_nvfp4,
    "requantize_to_max": requantize,
    "requantize_to_max of a stack": requantize_stack,
    "swap_gate_up": swap_gate_up,
    "expert_input_scale": expert_input_scale,
    "shared_input_scale": shared_input_scale,
    "expert_alphas": expert_alphas,
    "swizzle_block_scales": swizzle,
    "unswizzle_block_scales": unswizzle,
    "pack_fp4": pack,
    "unpack_fp4": unpack,
    "pack_nvfp4": pack_nvfp4,
    "unpack_nvfp4": unpack_nvfp4,
    "route": route,
    **{f"prepare {algo}": prepare(algo) for algo in LAYERS},
    **{f"linear {algo}": linear(algo) for algo in LAYERS},
    "ops.linear": linear_function,
    **{f"prepare experts {algo}": prepare_experts(algo) for algo in ("FP8", "NVFP4")},
    **{f"experts {algo}": moe(algo) for algo in ("FP8", "NVFP4")},
    "experts of codes": moe_of_codes,
}

# --- the same arrays lent by foreign producers

DLPACK_DTYPE = {
    np.dtype(np.float32): (2, 32, 1),
    np.dtype(np.uint8): (1, 8, 1),
    np.dtype(np.int32): (0, 32, 1),
}


def lend(array: np.ndarray, legacy: bool = False, **lies: Any) -> Lender:
    """A Lender of the array's own memory."""
    fields = {
        "shape": array.shape,
        "dtype": DLPACK_DTYPE[array.dtype],
        "strides": [stride // array.itemsize for stride in array.strides],
        "data": array.__array_interface__["data"][0],
        **lies,
    }
    lender = Lender(fields.pop("shape"), legacy, **fields)
    lender.array = array  # type: ignore[attr-defined]
    return lender


class Foreign(MutableProducer):
    """A producer whose library adopts results as NumPy arrays; `given` counts the capsules it handed out."""

    def __init__(self, lender: Lender, device: Any = (CPU, 0), name: bytes | None = None) -> None:
        super().__init__(lender, device, name)
        self.given = 0

    def __dlpack__(self, **keywords: Any) -> Any:
        capsule = super().__dlpack__(**keywords)
        self.given += 1
        return capsule

    def __array_namespace__(self, api_version: Any = None) -> Any:
        return np

    def balanced(self) -> bool:
        """Every capsule was freed, once."""
        return self.lender.deleted == self.given


class Counted(Exchange):
    """A working exchange API over a Lender that counts the owning views it handed out."""

    def balanced(self) -> bool:
        return self.lender.deleted == self.calls.count("from_object")


def exchange_object(lender: Lender, *, borrow: bool = True, **attributes: Any) -> tuple[Any, Counted]:
    """An object of a fresh type with the exchange API, and the API's counters."""
    exchange = Counted(lender, borrow=borrow)
    return make_type(exchange, __iadd__=lambda self, other: self, **attributes)(), exchange
