"""Options that say how block scales and codes are stored, where the file does not."""

import argparse
from typing import Any, get_args

from moqext.reader.formats.layouts import Nibbles, ScaleLayout


def add_layout_options(parser: argparse.ArgumentParser, of_what: str = "the checkpoint") -> None:
    """Declares `--scale-layout` and `--nibbles`."""
    parser.add_argument(
        "--scale-layout",
        choices=get_args(ScaleLayout),
        help=f"order of the block scales of {of_what}, where their shape leaves it open: swizzled is that of "
        "cuBLAS, in tiles of 128 x 4; by default what the file says",
    )
    parser.add_argument(
        "--nibbles",
        choices=get_args(Nibbles),
        help=f"half of a byte that holds the even column in {of_what}: low as ModelOpt, high as ComfyUI; by "
        "default what the file says",
    )


def layout_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options as arguments of `Checkpoint`."""
    return {"scale_layout": args.scale_layout, "nibbles": args.nibbles}
