"""The examples run and print what their heads promise; those of framework packages: tests/frameworks."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ENGINE_LINES = 60


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs an example with arguments; returns the lines it printed."""

    def run_example(name, *arguments):
        monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run_example


def test_the_index_has_every_example():
    listed = re.findall(r"\]\(([\w]+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))


def test_layer_errors(data, run):
    lines = run("layer_errors.py", data / "checkpoints" / "llama_nvfp4_kvfp8", 128)
    assert len(lines) == 7
    for line in lines:
        fp8, fp4 = map(float, re.findall(r"([\d.]+)%", line))
        assert 1 < fp8 < 6, line  # folded weights and E4M3 activations, about 2 % each
        assert fp4 > fp8, line


@pytest.mark.parametrize(
    "checkpoint, limit",
    [
        ("llama_nvfp4_kvfp8", 1e-5),  # exact weights and float32 activations
        ("llama_fp8_kvfp8", 0.06),  # activations in E4M3
    ],
)
def test_numpy_linear(data, run, checkpoint, limit):
    first, second = run("numpy_linear.py", data / "checkpoints" / checkpoint)
    assert re.fullmatch(r"cpu:\w+: \(2, 3, 128\) -> \(2, 3, 256\)", first)
    assert float(second.split()[-1]) < limit


def check_torch_ops(lines, family):
    assert lines[0] == "codes: torch.float8_e4m3fn (256, 512) scales: torch.float32 (256, 1)"
    kernel, error = re.fullmatch(r"(\w+):\w+: ([\d.]+)% from the weight in bfloat16", lines[1]).groups()
    assert kernel == family
    assert 1 < float(error) < 6  # weights and activations in E4M3, about 2.6 % each
    assert lines[2] == "silu(gate) * up: torch.float8_e4m3fn (16, 512) scales: (16, 1)"


def test_torch_ops(run):
    pytest.importorskip("torch", minversion="2.10")
    check_torch_ops(run("torch_ops.py", "cpu"), "cpu")


@pytest.mark.gpu
def test_torch_ops_on_a_device(run):
    pytest.importorskip("torch", minversion="2.10")
    check_torch_ops(run("torch_ops.py", "cuda:0"), "cuda")


def test_jax_linear(data, run):
    pytest.importorskip("jax")
    lines = run("jax_linear.py", data / "checkpoints" / "llama_nvfp4_kvfp8")
    assert re.fullmatch(r"cpu:\w+: ArrayImpl \(4, 128\) -> ArrayImpl \(4, 256\), bfloat16", lines[0])
    assert lines[1:] == ["its silu: (4, 256)"]


@pytest.mark.gpu
def test_cupy_linear(data, run):
    pytest.importorskip("cupy")
    lines = run("cupy_linear.py", data / "checkpoints" / "llama_nvfp4_kvfp8")
    assert re.fullmatch(r"cuda:\w+: ndarray \(4, 128\) -> ndarray \(4, 256\), float16", lines[0])
    assert lines[1:] == ["equal on a stream of its own: True"]


def check_own_engine(lines):
    """The projection is fused, the head excluded."""
    assert re.match(r"model\.layers\.0\.self_attn\.qkv_proj: LinearMethod\(\S+ 128 -> 128\+64\+64,", lines[0])
    assert lines[1:] == ["(4, 128) -> (4, 256)", "lm_head: not quantized", "(4, 128) -> (4, 64)"]


@pytest.mark.parametrize("checkpoint", ["llama_nvfp4_kvfp8", "llama_fp8_kvfp8", "llama_fp8_pb_wo"])
def test_own_engine(data, run, checkpoint):
    pytest.importorskip("torch", minversion="2.10")
    check_own_engine(run("own_engine.py", data / "checkpoints" / checkpoint))


@pytest.mark.gpu
def test_own_engine_on_a_device(data, run):
    pytest.importorskip("torch", minversion="2.10")
    check_own_engine(run("own_engine.py", data / "checkpoints" / "llama_nvfp4_kvfp8", "cuda:0"))


def test_the_linear_of_the_own_engine_is_that_of_the_checkpoint(data):
    """Whatever order its tensors come in; one that is missing is refused, and the class is short."""
    torch = pytest.importorskip("torch", minversion="2.10")
    import moqext

    path = EXAMPLES / "own_engine.py"
    assert len([line for line in path.read_text().splitlines() if line.strip()]) <= ENGINE_LINES
    engine = runpy.run_path(str(path))
    attention = "model.layers.0.self_attn"
    with moqext.Checkpoint(data / "checkpoints" / "llama_nvfp4_kvfp8") as ckpt:

        def load(names):
            linear = engine["EngineLinear"](ckpt.config, f"{attention}.qkv_proj", 128, [128, 64, 64], "cpu")
            for name in names:
                stored = engine["DTYPES"].get(ckpt.tensors[name].dtype)
                linear.load(name, engine["as_torch"](ckpt.tensor(name), stored))
            linear.prepare()
            return linear

        expected = ckpt.load([f"{attention}.{part}_proj" for part in "qkv"])
        x = torch.randn(3, 128, dtype=torch.bfloat16)
        for names in (list(ckpt.tensors), list(reversed(ckpt.tensors))):
            assert load(names).apply(x).equal(expected(x))
        with pytest.raises(ValueError, match="weight: expected 3 tensors, one a partition, got 2"):
            load(name for name in ckpt.tensors if name != f"{attention}.k_proj.weight")


def test_convert(data, run, tmp_path):
    lines = run("convert.py", data / "checkpoints" / "llama_fp8_kvfp8", tmp_path / "out")
    assert any(line.startswith("100% ") for line in lines)
    rounded = [float(error) for error in re.findall(r"rounded by ([\d.]+)%", "\n".join(lines))]
    assert len(rounded) == 7
    assert all(0 < error < 0.4 for error in rounded)  # at most half of bfloat16's last bit, 2^-9
