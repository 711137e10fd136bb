"""Every kernel that a device can run, on random layers, against the float64 reference.

A case is a layer of random size with some tokens, and one kernel in one of its configs, which the plan keeps
as `tune` has it. The output is poisoned before. Limits are those of `verify`, beyond what the order of sums
explains. Cases follow from the seed alone: the time that there is says how many there are.
"""

import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise, zip_longest
from math import isfinite
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moqext import _C, reference
from moqext._C import UnsupportedQuantization
from moqext.algorithms import ALGORITHMS, LINEARS
from moqext.layers.linear import LinearMethod
from moqext.layers.load_experts import prepare_stacks
from moqext.layers.moe import MoEMethod
from moqext.ops import to_device, to_host
from moqext.ops.spelling import Activation, Compute, DtypeName
from moqext.tools import expert_slack, linear_slack
from moqext.tools.random_layers import poisoned, random_experts, random_linear, random_x
from moqext.tools.verify_experts import OPTIONS, all_experts, few_experts, filled_stacks
from moqext.tools.verify_row import LIMITS, compare, reason_of, within_reach

COMPUTES: tuple[Compute, ...] = ("exact", "fp8", "fp4")
"""Ways to multiply; "auto" takes kernels of the first two."""

DTYPES: tuple[DtypeName, ...] = ("bfloat16", "float16", "float32")
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai")

USUAL_LINEAR, USUAL_EXPERTS = (4096, 4096), (8, 1024, 512)
"""Sizes that suit every kernel: rows and columns; experts, hidden size and intermediate size."""

MOST_TOKENS = (1, 16, 64, 320)
"""A layer meets as many tokens, and others between."""

TILE = 128
"""Sizes of a third of the layers are multiples of it."""

MOST_CONFIGS = 8
"""Configs of a kernel that a number of tokens of a layer meets; a kernel with more has others each time."""

MOST_FAULTS = 8
"""Cases that are told of a kernel that fails."""

Operation = Literal["linear", "experts"]


class Kind(NamedTuple):
    """Layers of one format.

    Attributes:
        operation: What they compute.
        quant_algo: Canonical algorithm.
        compute: What is multiplied.
    """

    operation: Operation
    quant_algo: str
    compute: Compute

    @property
    def format(self) -> str:
        """The algorithm, with the compute where it is not exact: "NVFP4,fp8"."""
        return self.quant_algo if self.compute == "exact" else f"{self.quant_algo},{self.compute}"


@dataclass
class KernelRow:
    """A kernel and how it did.

    Attributes:
        operation: Kind of layers that it runs.
        kernel: "family:name".
        formats: Names of those that it can run, as of `Kind.format`.
        checked: Those of them that cases had.
        cases: How many outputs were compared.
        relative_error, max_error: Largest errors, as of `verify`; of outputs outside of the limits, what the
            order of sums does not explain.
        of_limit: Largest error as a part of its limit.
        worst: Case of that one.
        faults: Cases that were wrong, the first few.
        wrong: How many were.
    """

    operation: Operation
    kernel: str
    formats: list[str] = field(default_factory=list)
    checked: set[str] = field(default_factory=set)
    cases: int = 0
    relative_error: float = 0.0
    max_error: float = 0.0
    of_limit: float = 0.0
    worst: str = ""
    faults: list[str] = field(default_factory=list)
    wrong: int = 0

    @property
    def verdict(self) -> str:
        """How it did: "ok", "wrong", or "not reached" where there was no time for it."""
        return "wrong" if self.wrong else "ok" if self.cases else "not reached"

    def is_first(self, kind: Kind) -> bool:
        """Whether no kind before had the kernel."""
        return kind.operation == self.operation and self.formats[:1] == [kind.format]

    def fail(self, case: str, why: str) -> None:
        """Counts a wrong case."""
        self.wrong += 1
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(f"{case}: {why}")

    def add(self, case: str, errors: tuple[float, float], dtype: str) -> None:
        """Counts a case by its errors."""
        self.cases += 1
        share = max(error / limit for error, limit in zip(errors, LIMITS[dtype], strict=True))
        self.relative_error = max(self.relative_error, errors[0])
        self.max_error = max(self.max_error, errors[1])
        if not share < self.of_limit:
            self.of_limit, self.worst = share, case
        if not share <= 1:
            told = f"errors {errors[0]:.2e} and {errors[1]:.2e}" if isfinite(share) else "not finite"
            self.fail(case, told)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which has no infinity: such an error is null."""
        errors = {name: getattr(self, name) for name in ("relative_error", "max_error", "of_limit")}
        return {
            "operation": self.operation,
            "kernel": self.kernel,
            "verdict": self.verdict,
            "formats": self.formats,
            "checked": sorted(self.checked),
            "cases": self.cases,
            "wrong": self.wrong,
            **{name: error if isfinite(error) else None for name, error in errors.items()},
            "worst": self.worst,
            "faults": self.faults,
        }


class Selftest:
    """The kernels of a device.

    Args:
        device: "cpu" or "cuda:N".
        seed: Of all layers.
        clock: Seconds since some moment.

    Attributes:
        kinds: All that run there, the first of each kernel before the others.
        rows: A row a kernel and operation.
        layers: How many were made.
    """

    def __init__(self, device: str, seed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._device, self._seed, self._clock = device, seed, clock
        self._rows: dict[tuple[str, str], KernelRow] = {}
        self.layers = 0
        by_operation = [list(self._find("linear")), list(self._find("experts"))]
        kinds = [kind for pair in zip_longest(*by_operation) for kind in pair if kind is not None]
        self.kinds = sorted(kinds, key=lambda kind: not any(row.is_first(kind) for row in self.rows))

    @property
    def rows(self) -> list[KernelRow]:
        """Linears first, in the order of the tables."""
        return sorted(self._rows.values(), key=lambda row: row.operation != "linear")

    def run(self, until: float, progress: Callable[[str], object] = lambda name: None) -> None:
        """Checks layer by layer, at least one, until the clock says `until`.

        Args:
            until: No layer is begun then.
            progress: Told of each layer.
        """
        for turn in count():
            for index, kind in enumerate(self.kinds):
                if self.layers and self._clock() >= until:
                    return
                progress(f"{kind.format}, {kind.operation}")
                rng = np.random.default_rng([self._seed, turn, index])
                check = self._check_linear if kind.operation == "linear" else self._check_experts
                check(kind, turn, rng)
                self.layers += 1
            if not self.kinds:
                return

    def _find(self, operation: Operation) -> Iterator[Kind]:
        """Kinds of layers that run, whose kernels get rows."""
        for algo in LINEARS:
            for compute in COMPUTES:
                kind = Kind(operation, algo, compute)
                try:
                    plan = usual_method(kind, self._device)._plan
                except UnsupportedQuantization:
                    continue
                for kernel, reason in plan.explain():
                    if reason is None:
                        self._row(kind, kernel).formats.append(kind.format)
                yield kind

    def _row(self, kind: Kind, kernel: str) -> KernelRow:
        return self._rows.setdefault((kind.operation, kernel), KernelRow(kind.operation, kernel))

    def _check_linear(self, kind: Kind, turn: int, rng: np.random.Generator) -> None:
        group_size = _group_size(kind, turn, rng)
        algo = kind.quant_algo
        step = 2 if ALGORITHMS[algo].codes == "int4" else 1
        columns = _size(rng, turn, 768, _group(algo, group_size))
        rows = [_size(rng, turn, 320, step, 16 + step) for _ in range(rng.integers(1, 4) if turn else 1)]
        dtype = _dtype(turn, rng)
        scaled = not turn or bool(rng.random() < 0.75)
        layer = random_linear(rng, algo, rows, columns, group_size, input_scale=scaled)
        sizes = f"{'+'.join(map(str, rows))} × {columns}"
        about = f"{kind.format}, {sizes}, {dtype}"
        try:
            method = layer.method(device=self._device, dtype=dtype, compute=kind.compute)
            params = method.prepare(
                {role: [self._codes(each) for each in parts] for role, parts in layer.listed().items()}
            )
        except UnsupportedQuantization:
            return
        except (ValueError, TypeError, BufferError, RuntimeError) as error:
            self._fail_all(kind, about, error)
            return
        bias = rng.standard_normal(sum(rows)).astype(np.float32) if rng.random() < 0.5 else None
        given = None if bias is None else self._there(bias)
        ends = np.cumsum(rows).tolist()
        shares = [
            None if bias is None else bias[end - size : end] for end, size in zip(ends, rows, strict=True)
        ]
        options: dict[str, Any] = {"compute": kind.compute, "group_size": layer.group_size}
        for tokens in _counts(rng):
            x = random_x(rng, tokens, columns, dtype)
            values, there = reference.as_float32(x), self._there(x)
            exact = np.concatenate(
                [
                    reference.linear(x, part, algo, bias=share, out_dtype="float64", **options)
                    for part, share in zip(layer.parts, shares, strict=True)
                ],
                axis=-1,
            )

            def slack(kernel: str, x: Any = values) -> NDArray[np.float64]:
                cores = linear_slack.sums_in_cores(kernel)
                parts = [
                    linear_slack.linear_slack(
                        x, part, algo, dtype=dtype, bias=share, in_cores=cores, **options
                    )
                    for part, share in zip(layer.parts, shares, strict=True)
                ]
                return np.concatenate(parts, axis=-1)

            def call(out: Any, x: Any = there) -> Any:
                return method(x, params, given, out)

            self._check_kernels(kind, method, tokens, _Case(about, exact, slack, call, rng.spawn(1)[0]))

    def _check_experts(self, kind: Kind, turn: int, rng: np.random.Generator) -> None:
        group_size = _group_size(kind, turn, rng)
        step = 2 if ALGORITHMS[kind.quant_algo].codes == "int4" else 1
        group = np.lcm(_group(kind.quant_algo, group_size), step)
        experts, top_k = int(rng.integers(3, 9)), int(rng.integers(1, 4))
        hidden, inner = (_size(rng, turn, 256, int(group)) for _ in range(2))
        gated, dtype = bool(rng.random() < 0.8), _dtype(turn, rng)
        activation = ACTIVATIONS[rng.integers(len(ACTIVATIONS) - (not gated))]
        about = (
            f"{kind.format}, experts {experts} × {hidden} × {inner}, {top_k} a token, {activation}, {dtype}"
        )
        try:
            method = MoEMethod(
                kind.quant_algo,
                experts,
                hidden,
                inner,
                top_k=top_k,
                activation=activation,
                gated=gated,
                group_size=group_size,
                dtype=dtype,
                device=self._device,
                compute=kind.compute,
            )
            by_token = ALGORITHMS[kind.quant_algo].by_token
            scaled = not by_token or bool(rng.random() < 0.5)
            stacks = random_experts(rng, method, bias=bool(rng.random() < 0.5), input_scale=scaled)
            params = prepare_stacks(method, stacks)
        except UnsupportedQuantization:
            return
        except (ValueError, TypeError, BufferError, RuntimeError) as error:
            self._fail_all(kind, about, error)
            return
        options = {name: getattr(method, name) for name in (*OPTIONS, "compute")}
        stored = filled_stacks(stacks)
        for number, least in enumerate(_counts(rng)[: 3 if turn else 2]):
            route = few_experts if number % 2 else all_experts
            weights, ids = route(rng, least, method)
            tokens = len(ids)
            x = random_x(rng, tokens, hidden, dtype)
            values = reference.as_float32(x)
            there = [self._there(array) for array in (x, weights, ids)]
            exact = reference.experts_reference(values, stored, weights, ids, **options)

            def slack(kernel: str, x: Any = values, weights: Any = weights, ids: Any = ids) -> Any:
                cores = expert_slack.sums_in_cores(kernel)
                rounded = expert_slack.rounds_d(kernel, dtype)
                return expert_slack.expert_slack(
                    x, stored, weights, ids, in_cores=cores, rounded=rounded, **options
                )

            def call(out: Any, there: Sequence[Any] = there) -> Any:
                return method(there[0], params, there[1], there[2], out=out)

            self._check_kernels(kind, method, tokens, _Case(about, exact, slack, call, rng.spawn(1)[0]))

    def _check_kernels(
        self, kind: Kind, method: LinearMethod | MoEMethod, tokens: int, case: "_Case"
    ) -> None:
        """Compares the outputs of every kernel that runs so many tokens, in all of its configs."""
        plan, known = method._plan, dict[tuple[bytes, Any], tuple[float, float]]()
        expected = np.asarray(reference.round_to(case.exact, method.dtype), np.float64)
        for kernel, reason in plan.explain(tokens):
            if reason is not None:
                continue
            row, slack = self._row(kind, kernel), None
            for variant in variants_of(plan, tokens, kernel, case.rng):
                told = f"{case.about}, {tokens} token{'s' * (tokens != 1)}" + (
                    f", config {variant}" if variant else ""
                )
                plan.keep(tokens, kernel, variant)
                row.checked.add(kind.format)
                try:
                    y = self._output(case, method.dtype)
                except UnsupportedQuantization:
                    continue
                except (ValueError, TypeError, BufferError, RuntimeError) as error:
                    row.fail(told, reason_of("", error))
                    continue
                key = (y.tobytes(), _sums_of(kind, kernel, method.dtype))
                if key not in known:
                    known[key] = compare(y, expected)
                    if not all(map(operator.le, known[key], LIMITS[method.dtype])):
                        slack = case.slack(kernel) if slack is None else slack
                        near = within_reach(y.astype(np.float64), case.exact, slack, method.dtype)
                        known[key] = compare(near, expected)
                row.add(told, known[key], method.dtype)

    def _output(self, case: "_Case", dtype: str) -> NDArray[np.float32]:
        out = self._there(poisoned(case.exact.shape, dtype))
        y = case.call(out)
        return reference.as_float32(y if self._device == "cpu" else to_host(y))

    def _there(self, array: NDArray[Any]) -> Any:
        return array if self._device == "cpu" else to_device(np.ascontiguousarray(array), self._device)

    def _codes(self, array: NDArray[Any]) -> Any:
        """Codes where the device is; scales stay on the host."""
        return array if array.dtype == np.float32 else self._there(array)

    def _fail_all(self, kind: Kind, about: str, error: Exception) -> None:
        """Counts a layer that cannot be made against every kernel of its format."""
        for row in self._rows.values():
            if row.operation == kind.operation and kind.format in row.formats:
                row.fail(about, reason_of("", error))


class _Case(NamedTuple):
    """A layer with x.

    Attributes:
        about: It in a few words.
        exact: Outputs of the reference before they are rounded.
        slack: How far outputs of a kernel may be from them.
        call: Computes into an output.
        rng: Source of configs, which leaves layers the same on every device.
    """

    about: str
    exact: NDArray[np.float64]
    slack: Callable[[str], NDArray[np.float64]]
    call: Callable[[Any], Any]
    rng: np.random.Generator


def usual_method(kind: Kind, device: str) -> LinearMethod | MoEMethod:
    """A layer of sizes that suit every kernel of its format.

    Raises:
        UnsupportedQuantization: No kernel runs any.
    """
    if kind.operation == "linear":
        rows, columns = USUAL_LINEAR
        return LinearMethod(kind.quant_algo, columns, [rows], device=device, compute=kind.compute)
    return MoEMethod(kind.quant_algo, *USUAL_EXPERTS, top_k=2, device=device, compute=kind.compute)


def variants_of(plan: _C.Plan, tokens: int, kernel: str, rng: np.random.Generator) -> list[int]:
    """Ways in which a plan keeps a kernel: its own choice, and configs of its table in an order of chance."""
    numbers = [number + 1 for name, number, *_ in plan.configs(tokens) if name == kernel]
    variants = [0, *rng.permutation(numbers).astype(int).tolist()[:MOST_CONFIGS]]
    return [variant for variant in variants if plan.has_variant(tokens, kernel, variant)]


def _sums_of(kind: Kind, kernel: str, dtype: str) -> tuple[bool, bool]:
    """Facts of a kernel that its slack depends on."""
    if kind.operation == "linear":
        return linear_slack.sums_in_cores(kernel), False
    return expert_slack.sums_in_cores(kernel), expert_slack.rounds_d(kernel, dtype)


def _dtype(turn: int, rng: np.random.Generator) -> DtypeName:
    """A third of the layers are of any dtype, the first are not."""
    return DTYPES[rng.integers(len(DTYPES))] if turn % 3 == 2 else "bfloat16"


def _group_size(kind: Kind, turn: int, rng: np.random.Generator) -> int | None:
    """Draws another group size in some turns, where the algorithm has any."""
    facts = ALGORITHMS[kind.quant_algo]
    sizes = facts.group_sizes or ((32, 64) if facts.codes == "int4" else ())
    return int(rng.choice(sizes)) if turn % 3 == 1 and sizes else None


def _group(algo: str, group_size: int | None) -> int:
    """The number that columns are a multiple of."""
    facts = ALGORITHMS[algo]
    return (group_size or facts.group_size or 1) if facts.scales == "groups" else 1


def _size(rng: np.random.Generator, turn: int, most: int, step: int, least: int = 1) -> int:
    """A multiple of a step up to about `most`: of tiles, any, or of 16, in turns."""
    unit = int(np.lcm(step, (TILE, 1, 16)[turn % 3]))
    first = -(-least // unit)
    return unit * int(rng.integers(first, max(most // unit, first) + 1))


def _counts(rng: np.random.Generator) -> list[int]:
    """One token, then some, each up to one of `MOST_TOKENS`, in an order of chance."""
    found = [1]
    for low, high in pairwise(MOST_TOKENS):
        found.append(int(rng.integers(low + 1, high + 1)))
    return [found[place] for place in rng.permutation(len(found))]
