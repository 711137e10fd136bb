"""The base of all methods, whatever they compute: their tensors, and the kernels that run them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moqext import _C
from moqext.errors import CheckpointError
from moqext.layers import tuning
from moqext.ops.spelling import Compute


class ParamSpec(NamedTuple):
    """A tensor of a layer: what a framework has to allocate or will be given.

    Attributes:
        shape: Extents; a per-partition scale is a vector of one value a partition, and a checkpoint's scalar
            of any rank is accepted for it where there is one partition.
        dtype: "float8_e4m3fn", "float4_e2m1fn_x2" (two values a byte, the even column in the low nibble),
            "uint8" for packed weights, or "float32". A raw uint8 carrier is accepted for the first two.
        role: "codes", "scale" or "factor".
        required: False for a tensor that may be absent from a checkpoint of this algorithm.
    """

    shape: tuple[int, ...]
    dtype: str
    role: str
    required: bool


class Timing(NamedTuple):
    """The time that a kernel took in `LinearMethod.tune`.

    Attributes:
        tokens: Rows of x.
        kernel: "family:name".
        variant: Which of the kernel's ways to do it, e.g. of cuBLASLt's algorithms; 0 where there is one.
        seconds: Median of a call, on the device's clock where it runs on one.
        chosen: Whether the method uses it from now on.
    """

    tokens: int
    kernel: str
    variant: int
    seconds: float
    chosen: bool


class PlannedMethod:
    """A layer that is planned: which tensors it has, which kernel runs how many tokens, and why.

    Attributes:
        quant_algo: Canonical name of the algorithm.
        group_size: Columns that share a block scale, or None.
        dtype: Full name of the dtype of x and y.
        device: "cpu" or "cuda:N".
        compute: What is multiplied.
    """

    __slots__ = ("_plan", "compute", "device", "dtype", "group_size", "quant_algo")

    def __init__(self, plan: _C.Plan, compute: Compute) -> None:
        self._plan = plan
        self.quant_algo = plan.quant_algo
        self.group_size = plan.group_size
        self.dtype = plan.dtype
        self.device = plan.device
        self.compute: Compute = compute

    @property
    def checkpoint_params(self) -> dict[str, ParamSpec]:
        """The tensors a checkpoint holds for this layer, by name."""
        return {spec[0]: ParamSpec(*spec[1:]) for spec in self._plan.checkpoint_params()}

    @property
    def prepared_params(self) -> dict[str, ParamSpec]:
        """The tensors `prepare` returns, by name; known before any weight is loaded."""
        return {spec[0]: ParamSpec(*spec[1:]) for spec in self._plan.prepared_params()}

    def keeps(self, name: str) -> bool:
        """Whether codes or block scales stay as they are when they are prepared.

        Then `out` of `prepare` may have the very tensor that `params` have.

        Args:
            name: Of a tensor, in the checkpoint and prepared.
        """
        stored, prepared = self.checkpoint_params.get(name), self.prepared_params.get(name)
        if stored is None or prepared is None or stored.dtype == "float32":
            return False
        swizzled = self.compute == "fp4" and self.device != "cpu" and name.endswith("weight_scale")
        scales = self.checkpoint_params.get(f"{name}_scale")  # of MXFP8: folded into codes, or kept beside
        folded = (
            scales is not None and scales.dtype != "float32" and f"{name}_scale" not in self.prepared_params
        )
        return stored[:2] == prepared[:2] and not swizzled and not folded

    def tune(self, tokens: Sequence[int], params: Mapping[str, Any], *, save: bool = False) -> list[Timing]:
        """Times every kernel that can run, and cuBLASLt's algorithms, and keeps the fastest.

        Without it a kernel is chosen by the cache of `moqext tune`, else by an estimate, and cuBLASLt by its
        own. A choice holds for this method (copies know nothing of it) and the numbers of tokens near the one
        measured: those that round up to the same one of eight between powers of two. Results may change in
        their last bits, with `compute="auto"` as `compute_for` does. It takes a second or so for a number,
        memory for as many copies of the weight as keep it out of the caches, and waits for the device.

        Args:
            tokens: Numbers of rows of x, each measured alone on random values.
            params: What `prepare` returned.
            save: Writes the choices to the cache too, for methods of this description made from then on, in
                this process and others.

        Returns:
            All measurements, by number of tokens and then by time.

        Raises:
            ValueError: A number of tokens below 1, more than 64 different ones, parameters that do not fit.
            CheckpointError: There is no cache to write to (`MOQEXT_TUNE=0`), or its file is none.
        """
        path = tuning.cache_path() if save else None
        if save and path is None:
            raise CheckpointError("save: there is no cache to write to, since MOQEXT_TUNE is 0")
        timings = []
        for count in tokens:
            measured = self._plan.measure(count, params)
            self._plan.keep(count, *measured[0][:2])
            timings += [Timing(count, *row, chosen=row is measured[0]) for row in measured]
        if path is not None:
            chosen = [row[:4] for row in timings if row.chosen]
            tuning.save(path, self.device, {tuning.layer_key(self): tuning.cells_of(self._plan, chosen)})
        return timings

    @property
    def backend(self) -> str:
        """The kernel that runs one token, as "family:name"."""
        return self.backend_for(1)

    def backend_for(self, tokens: int) -> str:
        """The kernel that runs a call with so many rows of x, as "family:name".

        Args:
            tokens: Rows of x; 0 are chosen for as 1 is.

        Raises:
            UnsupportedQuantization: The kernel that `MOQEXT_KERNEL` named does not run as many.
            ValueError: A negative number.
        """
        return self._plan.backend(tokens)

    def compute_for(self, tokens: int) -> str:
        """The `compute` of a call with so many rows of x; for "auto" the one that it takes.

        Takes the arguments of `backend_for`, and raises its errors. Both answer for calls with an
        `input_scale`, without which "auto" never is "fp4".
        """
        return self._plan.compute_for(tokens)

    def explain(self, tokens: int | None = None) -> str:
        """One line per kernel: chosen, can run, or the reason why it cannot, and what else is to be known.

        "chosen, tuned" is one that was measured, by `tune` or in the cache of `moqext tune`.

        Args:
            tokens: Rows of x of a call. None asks which kernels can run some number of them, and the one for
                a single token is called chosen.

        Raises:
            ValueError: A negative number.
        """
        reasons, notes = dict(self._plan.explain(tokens)), dict(self._plan.notes())
        count = 1 if tokens is None else tokens
        chosen, how = self._chosen(count), "chosen, tuned" if self._plan.is_tuned(count) else "chosen"
        width = max(map(len, reasons))
        lines = []
        for name, reason in reasons.items():
            verdict = how if name == chosen else (f"no: {reason}" if reason else "can run")
            note = f" ({notes[name]})" if name in notes else ""
            lines.append(f"{name:{width}} {verdict}{note}")
        return "\n".join(lines)

    def _chosen(self, tokens: int) -> str | None:
        """`backend_for`, or None where no kernel runs as many."""
        try:
            return self.backend_for(tokens)
        except _C.UnsupportedQuantization:
            return None
