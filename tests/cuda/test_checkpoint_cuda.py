"""Genuine checkpoints on a CUDA device, without any framework: loaded, run, compared with the reference."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moqext import _C, Checkpoint, ops, reference
from moqext.__main__ import main

pytestmark = pytest.mark.gpu
RUNNABLE = {
    "llama_fp8_kvfp8": 7,
    "llama_fp8_pc_pt": 7,
    "llama_fp8_pb_wo": 7,
    "llama_nvfp4_kvfp8": 7,
    "llama_w4a16_nvfp4": 7,
    "llama_w4a8_nvfp4_fp8": 7,
    "qwen3moe_fp8": 4 + 1,
    "qwen3moe_nvfp4": 4 + 1,
}


def verify(capsys: Any, directory: Path, *options: str) -> tuple[int, Any]:
    status = main(["verify", str(directory), "--json", *options])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("case", RUNNABLE)
@pytest.mark.parametrize("tokens", ["1", "16", "70"])
def test_every_layer_passes(data: Path, capsys: Any, case: str, tokens: str) -> None:
    status, result = verify(capsys, data / "checkpoints" / case, "--device", "cuda", "--tokens", tokens)
    assert status == 0, result
    assert [row["status"] for row in result["rows"]] == ["ok"] * RUNNABLE[case]
    assert all(row["kernel"].startswith("cuda:") for row in result["rows"])
    assert result["device"] == "cuda:0"


def test_other_exports_pass(data: Path, capsys: Any) -> None:
    """Layers that run on the CPU run on the device, in every export that the tests ship."""
    for directory in sorted((data / "exports").iterdir()):
        if not (directory / "config.json").is_file():
            continue
        cpu, expected = verify(capsys, directory)
        if cpu != 0:
            continue
        status, result = verify(capsys, directory, "--device", "cuda:0")
        assert status == 0, (directory.name, result)
        found, wanted = ({row["layer"]: row["status"] for row in each["rows"]} for each in (result, expected))
        assert found == wanted, directory.name


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("compute", ["exact", "fp8", "fp4", "auto"])
def test_other_dtypes_and_computes(data: Path, capsys: Any, dtype: str, compute: str) -> None:
    directory = data / "checkpoints" / "llama_nvfp4_kvfp8"
    options = ("--device", "cuda:0", "--dtype", dtype, "--compute", compute)
    status, result = verify(capsys, directory, *options)
    assert status == 0, result


@pytest.mark.parametrize("compute", ["fp8", "auto"])
def test_mxfp8_as_fp8(data: Path, capsys: Any, compute: str) -> None:
    directory = data / "checkpoints" / "llama_mxfp8"
    status, result = verify(capsys, directory, "--device", "cuda:0", "--compute", compute)
    assert status == 0, result


def test_auto_is_the_device_and_no_framework_is_imported(data: Path) -> None:
    code = (
        "import sys; from moqext.__main__ import main; status = main(sys.argv[1:]); "
        "print({'torch', 'cupy'} & {*sys.modules}); sys.exit(status)"
    )
    directory = str(data / "checkpoints" / "llama_fp8_kvfp8")
    command = [sys.executable, "-c", code, "verify", directory, "--device", "auto"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"7 ok on cuda:0 ({_C.cuda_devices()[0]['name']});" in done.stdout
    assert done.stdout.endswith("set()\n")


def test_a_layer_takes_torch_and_own_tensors(rng: Any, data: Path) -> None:
    torch = pytest.importorskip("torch")
    with Checkpoint(data / "checkpoints" / "llama_fp8_pc_pt") as checkpoint:
        names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
        cpu = checkpoint.load(names)
        layer = checkpoint.load(names, device="cuda:0")
    assert layer.method.device == "cuda:0"
    assert {value.device for value in layer.params.values()} == {"cuda:0"}
    x = reference.encode(rng.standard_normal((5, layer.in_features)).astype(np.float32), "bfloat16")
    own = layer(ops.to_device(x))
    assert type(own) is type(next(iter(layer.params.values())))
    given = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        y = layer(given)
    stream.synchronize()
    assert y.dtype == torch.bfloat16
    bits = y.view(torch.int16).cpu().numpy().view(np.uint16)
    np.testing.assert_array_equal(bits, ops.to_host(own))
    expected = reference.as_float32(cpu(x))
    difference = np.linalg.norm(reference.as_float32(bits) - expected)
    assert difference <= 2 * 2.5e-3 * np.linalg.norm(expected)
