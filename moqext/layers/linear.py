"""LinearMethod: a quantized linear layer as a framework plugs it in.

Three steps, on plain tensors that the framework owns: the method says which tensors the checkpoint holds
(`checkpoint_params`), turns them once into the form a kernel wants (`prepare`), and multiplies
(`method(x, prepared)`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moqext import _C
from moqext.layers import tuning
from moqext.layers.method import PlannedMethod
from moqext.ops.scalars import as_tensors
from moqext.ops.spelling import Compute, Device, Dtype, Tensor, device_name, dtype_name
from moqext.variables import check_variables


class LinearMethod(PlannedMethod):
    """A linear layer y = x Wᵀ + bias whose weight W is quantized.

    Args:
        quant_algo: "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "NVFP4_AWQ", "NVFP4_SVD",
            "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MXFP4", "W4A8_MXFP4_FP8", "MXFP8", "W4A16_AWQ", "W4A8_AWQ",
            "W8A16" or "W8A8_SQ_PER_CHANNEL", in any spelling that configurations use.
        in_features: K, columns of the weight.
        out_partitions: Rows of each layer fused into this one, in order ([q, k, v] or [N]). Every partition
            keeps its own scales; none is requantized.
        group_size: Columns that share a block scale; None for the algorithm's own (16 for NVFP4, 32 for
            W4A8_NVFP4_FP8, MXFP4 and MXFP8, 128 for FP8_PB_WO and AWQ). All of NVFP4 take 16 and 32, AWQ any.
        dtype: Of x and y: "bfloat16", "float16" or "float32", or a framework's own object (`torch.bfloat16`,
            `numpy.float32`).
        device: "cpu" or "cuda:N", or a framework's own object (`torch.device("cuda", 0)`).
        compute: What is multiplied, see below.
        fast_accum: Sum FP8 products on CUDA as the tensor cores do, with about 14 bits, instead of in float32
            every 128 columns. Only cuBLASLt's kernels for FP8 and FP8_PER_CHANNEL_PER_TOKEN make use of it.
        one_input_scale: All partitions have the same `input_scale`, as those that were calibrated together
            have; `prepare` checks it. On CUDA fused FP8 layers are then multiplied at once.
        quantized_input: x is float8_e4m3fn already: what `ops.quantize(x, "fp8_tensor", scale=input_scale)`,
            `ops.rms_norm_quantize` and `ops.silu_and_mul_quantize` return for the layer's one `input_scale`,
            which the checkpoint has to have. For FP8, W4A8_NVFP4_FP8 and W4A8_MXFP4_FP8. y is of `dtype` as
            always, and has the bits of the same kernel with an x that it quantizes itself.
        batch_invariant: The bits of a row of y depend on no other row of x, nor on how many there are: one
            kernel runs all numbers of tokens and sums a row in one order. It is slower, see docs/numerics.md.
            Where one scale would be found from all of x, the checkpoint has to have `input_scale`.
        rank: Of the low-rank pair that each partition of NVFP4_SVD has; None for 32, as ModelOpt splits off.

    `compute="exact"` treats the activations as the algorithm prescribes and multiplies the weight exactly
    as stored: FP8 quantizes x to e4m3 with the checkpoint's `input_scale` (with amax / 448 of the whole x
    where the checkpoint has none), FP8_PER_CHANNEL_PER_TOKEN with one scale per token, FP8_PB_WO with one
    per token and 128 columns, W4A8_NVFP4_FP8 and W4A8_AWQ as FP8; W4A8_MXFP4_FP8 to e4m3 and
    W8A8_SQ_PER_CHANNEL to int8 with `input_scale`, or by token where the checkpoint has none; all others
    leave x as it is. A `pre_quant_scale` multiplies x before that. NVFP4_SVD adds `lora_b (lora_a x)` of the
    smoothed x as it is, in float32 and before the one rounding, whatever `compute` makes of x for the weight.

    NVFP4 weights also run as `"fp4"` (x quantized to NVFP4 with `input_scale`, or amax / 2688 of the whole
    x) and as `"fp8"` (x quantized per token, block scales folded into e4m3 weights: about 2 % of noise on
    top of NVFP4's own 9 %). MXFP4 and MXFP8 run as `"fp8"`, too: MXFP4 loses nothing in a row whose exponents
    differ by at most 14, MXFP8 only in codes that become subnormal.

    `compute="auto"` is `"exact"`, but on CUDA NVFP4, NVFP4_AWQ, NVFP4_SVD, W4A16_NVFP4 and MXFP4, from one
    prepared copy, run as `"fp8"` wherever that is expected to be faster for the number of tokens, which on
    Hopper is from some hundreds on: `compute_for` tells which. From capability 10.0 on it is `"fp4"` that
    NVFP4, NVFP4_AWQ and NVFP4_SVD run as so, in calls with an `input_scale`; others are exact there. A call
    has the bits that a method of that compute would give it. MXFP8, of which no one copy serves both, is
    `"fp8"` on CUDA.

    The attributes are the arguments, resolved: canonical names, the group size that holds. Copying and
    pickling work.

    Raises:
        UnsupportedQuantization: The algorithm, or its combination with `compute` or `device`, has no kernel.
        ValueError: An unknown algorithm; a size, dtype or option that cannot be right.
    """

    __slots__ = (
        "batch_invariant",
        "fast_accum",
        "in_features",
        "one_input_scale",
        "out_partitions",
        "quantized_input",
    )

    _plan: _C.LinearPlan

    def __init__(
        self,
        quant_algo: str,
        in_features: int,
        out_partitions: Sequence[int],
        *,
        group_size: int | None = None,
        dtype: Dtype = "bfloat16",
        device: Device = "cpu",
        compute: Compute = "exact",
        fast_accum: bool = False,
        one_input_scale: bool = False,
        quantized_input: bool = False,
        batch_invariant: bool = False,
        rank: int | None = None,
    ) -> None:
        check_variables(stacklevel=2)
        plan = _C.linear_plan(
            quant_algo,
            in_features,
            out_partitions,
            group_size,
            dtype_name(dtype),
            device_name(device),
            compute,
            fast_accum=fast_accum,
            one_input_scale=one_input_scale,
            quantized_input=quantized_input,
            batch_invariant=batch_invariant,
            rank=rank,
        )
        super().__init__(plan, compute)
        self.in_features = int(in_features)
        self.out_partitions = tuple(int(rows) for rows in out_partitions)
        self.fast_accum = bool(fast_accum)
        self.one_input_scale = bool(one_input_scale)
        self.quantized_input = bool(quantized_input)
        self.batch_invariant = bool(batch_invariant)
        tuning.take(plan, self, self.device)

    @property
    def out_features(self) -> int:
        """Rows of the weight: the sum of the partitions."""
        return sum(self.out_partitions)

    @property
    def rank(self) -> int | None:
        """Rank of the low-rank pair of each partition; None where there is none."""
        spec = self.checkpoint_params.get("lora_b")
        return None if spec is None else spec.shape[1]

    def prepare(self, params: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Turns checkpoint tensors into prepared ones. On CUDA it returns when they are written.

        Args:
            params: The tensors of `checkpoint_params` by name. Each may also be a list of one tensor per
                partition, and a scale a number. A scalar scale serves all partitions; one for each row may be
                [rows, 1].
            out: Prepared tensors of an earlier call to overwrite, for a reload in place: every one that
                `params` fill and no other, each with memory of its own. One that `params` would not fill
                (`input_scale`, `pre_quant_scale`) would keep the earlier checkpoint's, and is refused; None
                is as good as no entry. Where the prepared
                "weight" or "weight_scale" has the bytes of the checkpoint's (all but NVFP4 with
                compute="fp8", or packed for CUDA), it may be that tensor itself, if that is one and
                contiguous: no second weight is in memory then.

        Returns:
            A new dict of tensors of the same framework as the weight, or `out`.

        Raises:
            ValueError: A tensor is missing (in `params` or `out`), does not belong to this layer, has another
                shape than `checkpoint_params` says, or holds scales or codes that no intact checkpoint holds
                (negative, infinite or NaN; an `input_scale` of at most 2^-128, whose reciprocal float32 does
                not hold; a `weight_scale_2` above 2^124 where block scales are folded into FP8). A weight
                scale of zero means a weight of zero, over codes that are zero or NaN; over others it is lost.
            TypeError: A tensor of another dtype.
            BufferError: Memory that cannot be read or written, or `out` sharing memory with `params` in any
                other way, or two tensors of `out` sharing it.
        """
        if not isinstance(params, Mapping):
            raise TypeError(f"params: expected a mapping of names to tensors, got {type(params)}")
        given = {name: as_tensors(value) for name, value in params.items()}
        scale, spec = given.get("weight_scale"), self.checkpoint_params.get("weight_scale")
        if scale is not None and spec is not None and len(spec.shape) == 1:
            given["weight_scale"] = (
                [_row_scale(part) for part in scale] if isinstance(scale, list) else _row_scale(scale)
            )
        needed = self.prepared_params.get("input_scale")
        if needed is not None and needed.required and given.get("input_scale") is None:
            why = "batch_invariant" if self.batch_invariant else "quantized_input"
            raise ValueError(
                f"params['input_scale']: missing, and {self.quant_algo} with compute={self.compute!r} and "
                f"{why} has no other scale of x"
            )
        return self._plan.prepare(given, out)

    def __call__(
        self,
        x: Tensor,
        params: Mapping[str, Any],
        bias: Any = None,
        out: Any = None,
        stream: Any = None,
    ) -> Tensor:
        """Multiplies.

        Args:
            x: [..., in_features] of `dtype`, or float8_e4m3fn with `quantized_input`, any strides.
            params: What `prepare` returned, of this method or one of the same description; a tensor that the
                layer does not know is refused. On CUDA kernels read them ahead of time: a write to them by
                others has to have ended, not only to be ahead in the stream.
            bias: [out_features] of `dtype` or float32, added in float32 before the one rounding.
            out: [..., out_features] of `dtype` with contiguous rows; must not share memory with the rest.
            stream: CUDA stream; None is the caller's current one. Must be None on the CPU.

        Returns:
            `out`, or a new tensor of x's own framework.

        Raises:
            ValueError, TypeError, BufferError: An argument does not fit; nothing was written.
            RuntimeError: x asks for a gradient, which this operation does not have.
        """
        return self._plan.run(x, params, bias, out, stream)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        about = (self.quant_algo, self.in_features, self.out_partitions)
        options = (
            self.fast_accum,
            self.one_input_scale,
            self.quantized_input,
            self.rank,
            self.batch_invariant,
        )
        return make_method, (*about, self.group_size, self.dtype, self.device, self.compute, *options)

    def __repr__(self) -> str:
        parts = "+".join(map(str, self.out_partitions))
        return (
            f"LinearMethod({self.quant_algo!r}, {self.in_features} -> {parts}, dtype={self.dtype!r}, "
            f"device={self.device!r}, compute={self.compute!r}, backend={self.backend!r})"
        )


def make_method(
    quant_algo: str,
    in_features: int,
    out_partitions: tuple[int, ...],
    group_size: int | None,
    dtype: Dtype,
    device: Device,
    compute: Compute,
    fast_accum: bool = False,
    one_input_scale: bool = False,
    quantized_input: bool = False,
    rank: int | None = None,
    batch_invariant: bool = False,
) -> LinearMethod:
    """`LinearMethod` with every argument by position: what copies and pickles are made by."""
    return LinearMethod(
        quant_algo,
        in_features,
        out_partitions,
        group_size=group_size,
        dtype=dtype,
        device=device,
        compute=compute,
        fast_accum=fast_accum,
        one_input_scale=one_input_scale,
        quantized_input=quantized_input,
        batch_invariant=batch_invariant,
        rank=rank,
    )


def _row_scale(scale: Any) -> Any:
    """A scale for each row as one axis; exporters write [rows, 1], too."""
    shape: Sequence[int] = getattr(scale, "shape", ())
    return scale.reshape(-1) if len(shape) == 2 and shape[1] == 1 else scale
