"""What the plan's estimates cost: the kernel it chooses beside all that `LinearMethod.tune` measures.

A plan chooses by an estimate of seconds; where that is off, a slower kernel runs. For each layer and number
of tokens this measures every kernel and variant, and says how much the choice takes beyond the fastest. The
rows of `--json` are what estimates are fitted to.

    python -m benchmarks.choices [--shapes NxK ...] [--tokens M ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import math
import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import layers, record
from benchmarks.goals import geomean
from moqext.layers.linear import LinearMethod
from moqext.layers.method import Timing

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Choice(NamedTuple):
    """A number of tokens of a layer.

    Attributes:
        shape: (out_features, in_features).
        quant_algo: Of the layer.
        tokens: Rows of x.
        kernel: What the plan chooses, "family:name".
        timings: Of every kernel and variant, fastest first.
    """

    shape: tuple[int, int]
    quant_algo: str
    tokens: int
    kernel: str
    timings: Sequence[Timing]

    @property
    def chosen(self) -> Timing:
        """The timing of the chosen kernel in variant 0, as it runs unless it is tuned."""
        return next(t for t in self.timings if (t.kernel, t.variant) == (self.kernel, 0))

    @property
    def loss(self) -> float:
        """How much longer the choice takes than the fastest kernel in variant 0: 0.1 is a tenth."""
        untuned = min(t.seconds for t in self.timings if t.variant == 0)
        return self.chosen.seconds / untuned - 1

    @property
    def loss_of_all(self) -> float:
        """How much longer the choice takes than the fastest variant of every kernel: 0.1 is a tenth."""
        return self.chosen.seconds / self.timings[0].seconds - 1


def measure(
    torch: Any, shape: tuple[int, int], quant_algo: str, tokens: Iterable[int], device: str, seed: int
) -> list[Choice]:
    """A layer of normal values, quantized for real."""
    problem = layers.Problem.random(torch, shape, 64, device, seed, rotate=1)
    rows, columns = shape
    about = {"in_features": columns, "out_partitions": [rows], "device": device}
    method = LinearMethod(**about, **layers.method_arguments(quant_algo))
    params = method.prepare(problem.layer(quant_algo).checkpoint(0))
    choices = []
    for count in tokens:
        kernel = method.backend_for(count)
        choices.append(Choice(shape, quant_algo, count, kernel, method.tune([count], params)))
        method = copy.copy(method)  # what was tuned is forgotten
    return choices


def line(choice: Choice) -> str:
    """One of the printed table."""
    rows, columns = choice.shape
    others = {}
    for timing in choice.timings:
        others.setdefault(timing.kernel, timing)
    listed = ", ".join(f"{t.kernel}/{t.variant} {t.seconds * 1e6:.2f}" for t in list(others.values())[:4])
    return (
        f"{rows}x{columns} {choice.quant_algo} M={choice.tokens}: {choice.kernel} "
        f"{choice.chosen.seconds * 1e6:.2f} us, {choice.loss:.1%} lost "
        f"({choice.loss_of_all:.1%} of all variants): {listed}"
    )


def rows_of(choices: Iterable[Choice]) -> list[dict[str, Any]]:
    """One for each timing, as JSON holds them."""
    return [
        {
            "shape": list(choice.shape),
            "quant_algo": choice.quant_algo,
            "tokens": choice.tokens,
            "kernel": timing.kernel,
            "variant": timing.variant,
            "seconds": timing.seconds,
            "chosen": timing is choice.chosen,
        }
        for choice in choices
        for timing in choice.timings
    ]


def summary(choices: Sequence[Choice]) -> str:
    """The mean and the worst of the losses."""
    mean = geomean([1 + choice.loss for choice in choices]) - 1
    worst = max(choices, key=lambda choice: choice.loss)
    beyond = sum(choice.loss > 0.01 for choice in choices)
    return (
        f"{len(choices)} cells: {mean:.2%} lost in the mean, more than 1 % in {beyond}; "
        f"the worst: {line(worst)}"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--algo",
        nargs="+",
        choices=(*layers.ALGOS, *layers.NVFP4_ALGOS),
        default=layers.ALGOS,
        help="default: the algorithms of FP8",
    )
    parser.add_argument("--shapes", nargs="+", type=layers.shape_of, metavar="NxK", default=layers.SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, metavar="M", help="rows of x")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seed", type=int, help="of the data; a fresh one is drawn and printed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every timing to FILE")
    return parser.parse_args(arguments)


def main() -> None:
    """Measures, prints a line for each cell and, if asked, writes JSON."""
    options = parse()
    torch = import_module("torch")
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    choices: list[Choice] = []
    for shape in sorted(options.shapes, key=math.prod):
        for algo in options.algo:
            choices += measure(torch, shape, algo, sorted(options.tokens), options.device, seed)
            for choice in choices[-len(options.tokens) :]:
                print(line(choice))
    print(summary(choices))
    if options.json:
        record.write("choices", rows_of(choices), options.json, seed=seed)


if __name__ == "__main__":
    main()
