"""A grid of linears on chips that need not be here, for tests of the choice among kernels."""

from collections.abc import Iterator
from typing import NamedTuple

from moqext import _C

TOKENS = (1, 2, 4, 8, 16, 17, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 8192)
SHAPES = (
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (8192, 8192), (57344, 8192)),
    *((8192, 28672), (51200, 5120), (5120, 25600), (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384)),
    *((4096, 7168), (7168, 2048), (1024, 1024), (128, 16384), (96, 64)),
)
HOPPER = ("H200 SXM", "H100 SXM")
HOPPER_KINDS = (
    ("FP8", "exact", False),
    ("FP8_PER_CHANNEL_PER_TOKEN", "exact", False),
    ("FP8_PB_WO", "exact", False),
    ("NVFP4", "exact", False),
    ("NVFP4", "fp8", False),
    ("NVFP4", "fp8", True),
    ("NVFP4", "auto", False),
    ("MXFP8", "exact", False),
    ("W8A8_SQ_PER_CHANNEL", "exact", False),
)
OTHERS = ("8.0", "8.9", "10.0", "12.0")
OTHER_KINDS = (
    *(("FP8", "exact", False), ("FP8_PB_WO", "exact", False), ("NVFP4", "exact", False)),
    ("NVFP4", "fp4", False),
)


class Layer(NamedTuple):
    """A layer on a chip.

    Attributes:
        chip: As `capability` names it.
        quant_algo: Of the layer.
        compute: Of the layer.
        fast: Whether it may sum as the tensor cores do.
        partitions: Rows of what is fused.
        columns: Of all.
        tokens: Rows of x.
    """

    chip: str
    quant_algo: str
    compute: str
    fast: bool
    partitions: tuple[int, ...]
    columns: int
    tokens: tuple[int, ...] = TOKENS

    def plan(self) -> _C.LinearPlan:
        """The plan of this layer."""
        about = (self.quant_algo, self.columns, list(self.partitions), None, "bfloat16", "cuda:0")
        return _C.linear_plan(*about, self.compute, capability=self.chip, fast_accum=self.fast)


def layers() -> Iterator[Layer]:
    """The grid."""
    for chip in HOPPER:
        for kind in HOPPER_KINDS:
            for rows, columns in SHAPES:
                yield Layer(chip, *kind, (rows,), columns)
            yield Layer(chip, *kind, (4096, 1024, 1024), 4096)
    for chip in OTHERS:
        for kind in OTHER_KINDS:
            for rows, columns in ((4096, 4096), (28672, 4096), (8192, 28672)):
                yield Layer(chip, *kind, (rows,), columns, (1, 8, 16, 64, 512, 8192))
