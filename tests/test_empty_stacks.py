"""Tensors without elements whose first extent is whatever a header claims: nothing counts to it."""

from pathlib import Path

import numpy as np
import pytest

from moqext import Checkpoint, CheckpointError
from moqext.__main__ import main

from .expert_files import CONTAINER, write_checkpoint

MANY = 2**33
CONFIG = {"hidden_act": "silu", "num_experts_per_tok": 1, "dtype": "bfloat16"}


def empty(dtype: str, *shape: int) -> tuple[str, np.ndarray]:
    return dtype, np.empty(0, np.uint8).reshape(shape)


@pytest.fixture
def stacks(tmp_path: Path) -> Path:
    """FP8 experts, 2^33 of them by the shape."""
    tensors = {f"{CONTAINER}.{p}_proj": empty("F8_E4M3", MANY, 0, 0) for p in ("gate_up", "down")}
    scales = {f"{name}_weight_scale": ("F32", np.ones(1, np.float32)) for name in tensors}
    return write_checkpoint(tmp_path / "in", tensors | scales, "FP8", **CONFIG)


def test_stacks_are_refused_by_whatever_uses_them(stacks: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(stacks)
    with pytest.raises(CheckpointError, match=r"experts are empty, \[8589934592, 0, 0\]"):
        checkpoint.load(CONTAINER)
    told = r"shape_mismatch: experts without elements, of shape \[8589934592, 0, 0\]"
    with pytest.raises(CheckpointError, match=told):
        checkpoint.convert(tmp_path / "out", experts="unstacked")


def test_the_commands_end(stacks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(stacks)]) == 1
    assert main(["inspect", str(stacks), "--strict"]) == 1
    assert main(["compare", str(stacks), str(stacks)]) == 0


def test_a_plain_stack_is_not_unstacked(tmp_path: Path) -> None:
    name = f"{CONTAINER}.down_proj"
    write_checkpoint(tmp_path / "in", {name: empty("BF16", MANY, 0, 0)}, {"quant_algo": None}, **CONFIG)
    Checkpoint(tmp_path / "in").convert(tmp_path / "out", experts="unstacked")
    assert Checkpoint(tmp_path / "out").tensors[name].shape == (MANY, 0, 0)


def test_rows_without_columns_get_no_scales(tmp_path: Path) -> None:
    tensors = {
        "a.up_proj.weight": empty("F8_E4M3", MANY, 0),
        "a.up_proj.weight_scale": ("F32", np.array(1, np.float32)),
    }
    write_checkpoint(tmp_path / "in", tensors, "FP8", **CONFIG)
    with pytest.raises(CheckpointError, match=r"a\.up_proj\.weight.*its weight is empty, of shape"):
        Checkpoint(tmp_path / "in").convert(tmp_path / "out", to="fp8")


def test_an_embedding_without_columns_is_read_at_once(tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    tensors = {name: empty("F8_E4M3", MANY, 0), f"{name}_scale": ("F32", np.array(1, np.float32))}
    write_checkpoint(tmp_path / "in", tensors, "FP8", **CONFIG)
    assert main(["verify", str(tmp_path / "in")]) == 0
