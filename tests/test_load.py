"""Checkpoint.load on genuine exports: one linear, several fused, and what cannot be loaded."""

import copy
import pickle

import numpy as np
import pytest

from moqext import Checkpoint, CheckpointError, UnsupportedQuantization, reference

from .linear_cases import assert_close, random_x
from .svd_files import LAYER as SVD_LAYER
from .svd_files import QKV as SVD_QKV
from .svd_files import write_svd
from .work import each

QKV = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
RUNNABLE = (
    "llama_fp8_kvfp8",
    "llama_fp8_pc_pt",
    "llama_fp8_pb_wo",
    "llama_nvfp4_kvfp8",
    "llama_w4a16_nvfp4",
    "llama_w4a8_nvfp4_fp8",
    "llama_mxfp8",
    "llama_int4_awq",
    "llama_w4a8_awq",
    "llama_int8_sq",
)


def expected(checkpoint, names, x, dtype="float32"):
    """The layers one by one through the reference, side by side."""
    outputs = []
    for name in names:
        record = checkpoint.layer(name)
        params = {role: checkpoint.tensor(tensor) for role, tensor in record.tensors.items()}
        outputs.append(reference.linear(x, params, record.quant_algo, x_dtype=dtype, out_dtype="float64"))
    return np.concatenate(outputs, axis=-1)


@each("dtype", ["bfloat16", "float16", "float32"])
@each("case", RUNNABLE)
def test_fused_qkv_equals_the_three_layers(data, rng, case, dtype):
    with Checkpoint(data / "checkpoints" / case) as checkpoint:
        layer = checkpoint.load(QKV, dtype=dtype)
        assert layer.out_features == 128 + 64 + 64
        assert layer.names == tuple(QKV)
        x = random_x(rng, (2, 3, layer.in_features), dtype)
        y = layer(x)
        assert_close(y, expected(checkpoint, QKV, reference.as_float32(x), dtype), dtype)
        alone = [checkpoint.load(name, dtype=dtype)(x) for name in QKV]
        np.testing.assert_array_equal(y, np.concatenate(alone, axis=-1))


@pytest.mark.parametrize("unequal", [False, True])
def test_fused_layers_calibrated_together_say_so(data, monkeypatch, unequal):
    """One input scale for all, so that CUDA multiplies the fused layers at once."""
    with Checkpoint(data / "checkpoints" / "qwen3moe_fp8") as checkpoint:
        names = [f"model.layers.0.mlp.experts.3.{half}_proj" for half in ("gate", "up")]
        read, given = checkpoint.tensor, np.float32([0.5, 0.25 if unequal else 0.5])

        def tensor(name):
            half = name.endswith("up_proj.input_scale")
            return given[int(half)].reshape(()) if name.endswith("input_scale") else read(name)

        monkeypatch.setattr(checkpoint, "tensor", tensor)
        assert checkpoint.load(names).method.one_input_scale is not unequal
        assert not checkpoint.load(names[0]).method.one_input_scale


def test_experts_stored_one_by_one_load_as_linears(data, rng):
    for case in ("qwen3moe_fp8", "qwen3moe_nvfp4"):
        with Checkpoint(data / "checkpoints" / case) as checkpoint:
            names = [f"model.layers.0.mlp.experts.3.{half}_proj" for half in ("gate", "up")]
            layer = checkpoint.load(names, dtype="float32")
            x = random_x(rng, (4, layer.in_features), "float32")
            assert_close(layer(x), expected(checkpoint, names, x), "float32")


def test_out_is_written(data, rng):
    with Checkpoint(data / "checkpoints" / "llama_nvfp4_kvfp8") as checkpoint:
        layer = checkpoint.load(QKV[0], dtype="float32")
    x = random_x(rng, (2, 128), "float32")  # the layer outlives the checkpoint
    out = np.full((2, 128), np.nan, np.float32)
    assert layer(x, out=out) is out
    np.testing.assert_array_equal(out, layer(x))


def test_runs_on_torch_tensors(data, rng):
    torch = pytest.importorskip("torch")
    with Checkpoint(data / "checkpoints" / "llama_nvfp4_kvfp8") as checkpoint:
        layer = checkpoint.load(QKV)
    bits = random_x(rng, (3, 128), "bfloat16")
    x = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    y = layer(x)
    assert y.dtype == torch.bfloat16
    assert y.shape == (3, 256)
    np.testing.assert_array_equal(
        y.view(torch.int16).numpy().view(np.uint16), np.asarray(layer(bits)).view(np.uint16)
    )
    with pytest.raises(RuntimeError, match=r"detach"):
        layer(x.float().requires_grad_())


def test_what_does_not_run_says_so(data):
    with Checkpoint(data / "exports" / "w4a16_nvfp4") as checkpoint:
        name = checkpoint.layers()[0].name
        with pytest.raises(UnsupportedQuantization, match=rf'{name}: compute "fp4" needs NVFP4'):
            checkpoint.load(name, compute="fp4")
        assert np.isfinite(checkpoint.dequantize(name)).all()


@pytest.mark.parametrize("names", [[SVD_LAYER], SVD_QKV])
def test_low_rank_pairs_are_loaded(tmp_path, rng, names):
    """The rank is what the file has, and each of several fused layers keeps its pair."""
    with Checkpoint(write_svd(tmp_path / "svd", rng, layers=names)) as checkpoint:
        layer = checkpoint.load(names if len(names) > 1 else names[0], dtype="float32")
        assert layer.method.rank == 4
        x = rng.standard_normal((5, 128)).astype(np.float32)
        y = np.split(layer(x), len(names), axis=-1)
        for name, own in zip(names, y, strict=True):
            roles = checkpoint.layer(name).tensors.items()
            params = {role: checkpoint.tensor(tensor) for role, tensor in roles}
            expected = reference.linear(x, params, "NVFP4_SVD", out_dtype="float64")
            np.testing.assert_allclose(own, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_pairs_of_several_ranks_are_not_fused(tmp_path, rng):
    directory = write_svd(tmp_path / "svd", rng, layers=SVD_QKV, ranks=(4, 8, 4))
    with Checkpoint(directory) as checkpoint:
        with pytest.raises(UnsupportedQuantization, match=r"the same rank, got .*q_proj 4, .*k_proj 8"):
            checkpoint.load(SVD_QKV)
        assert checkpoint.load(SVD_QKV[1]).method.rank == 8


def test_layers_that_do_not_belong_together(data):
    with Checkpoint(data / "checkpoints" / "llama_fp8_kvfp8") as checkpoint:
        with pytest.raises(ValueError, match=r"the same in_features, got .*q_proj 128, .*down_proj 256"):
            checkpoint.load([QKV[0], "model.layers.0.mlp.down_proj"])
        with pytest.raises(CheckpointError, match=r"nothing quantized is named.*did you mean.*q_proj"):
            checkpoint.load("model.layers.0.self_attn.p_proj")
        with pytest.raises(
            CheckpointError, match=r"'lm_head' is not quantized: its weight is stored as BF16"
        ):
            checkpoint.load("lm_head")
        with pytest.raises(ValueError, match=r"at least one name"):
            checkpoint.load([])


@pytest.mark.parametrize(
    "case, name, says",
    [
        (
            "exports/gpt_oss_nvfp4",
            "model.layers.0.mlp.experts.down_proj",
            "a projection of 4 stacked experts (NVFP4), which run together: "
            "load 'model.layers.0.mlp.experts'; dequantize('model.layers.0.mlp.experts.down_proj') reads it",
        ),
        (
            "exports/fp8_embedding",
            "model.embed_tokens",
            "an embedding table (FP8), which is looked up and not multiplied; "
            "dequantize('model.embed_tokens') reads it",
        ),
    ],
)
def test_what_is_no_linear_says_what_can_be_done_instead(data, case, name, says):
    with Checkpoint(data / case) as checkpoint:
        with pytest.raises(UnsupportedQuantization) as caught:
            checkpoint.load(name)
        assert str(caught.value) == f"{name}: {says}"
        record = checkpoint.layer(name)
        instead = getattr(record, "members", ())[:1] or getattr(record, "projections", ()) or [record]
        for part in instead:
            assert checkpoint.dequantize(part.name).size


def test_several_names_in_any_iterable(data):
    with Checkpoint(data / "checkpoints" / "llama_fp8_kvfp8") as checkpoint:
        for names in (tuple(QKV), iter(QKV), dict.fromkeys(QKV), map(checkpoint.layer, QKV)):
            assert checkpoint.load(names).names == tuple(QKV)


@pytest.mark.parametrize("wrong", [None, 3, b"name", [None], [3]])
def test_what_is_no_name_is_refused(data, wrong):
    with Checkpoint(data / "checkpoints" / "llama_fp8_kvfp8") as checkpoint:
        with pytest.raises(TypeError, match="expected a name"):
            checkpoint.load(wrong)
        with pytest.raises(TypeError, match="expected a name"):
            checkpoint.dequantize(wrong)


def test_a_layer_can_be_copied_and_pickled(data, rng):
    with Checkpoint(data / "checkpoints" / "llama_fp8_kvfp8") as checkpoint:
        layer = checkpoint.load(QKV, dtype="float32")
    x = rng.standard_normal((3, layer.in_features), dtype=np.float32)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert again.names == layer.names
        np.testing.assert_array_equal(again(x), layer(x))
