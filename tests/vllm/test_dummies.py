"""`load_format="dummy"`: engines that make their weights up run, with numbers that a format may have."""

import shutil

import pytest

from tests.vllm_cases import DATA, GENERATED

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]


@pytest.fixture(scope="module")
def made_up(each, tmp_path_factory):
    place = tmp_path_factory.mktemp("configurations")
    for name in GENERATED:
        (place / name).mkdir()
        shutil.copy(DATA / "checkpoints" / name / "config.json", place / name)
    return each("made_up", {name: place / name for name in GENERATED})


@pytest.mark.parametrize("name", GENERATED)
def test_engines_run_without_files(made_up, name):
    tokens, methods, outputs = made_up[name]
    assert methods["MoqextModelOptLinearMethod"] == len(outputs) > 0
    assert ("MoqextModelOptMoEMethod" in methods) == name.startswith("qwen3moe")
    assert all(outputs.values()), outputs
    assert {len(each) for each in tokens} == {16}


def test_the_benchmark_of_experts_has_all_that_a_model_loads(engine, tmp_path):
    """Without files, through vLLM's own loader of the model: FP8 and NVFP4 of one small model."""
    from benchmarks import vllm_random

    for quant_algo in ("FP8", "NVFP4"):
        vllm_random.write_config(tmp_path / quant_algo, quant_algo, tiny=True)
    for tokens, methods in engine("random", tmp_path / "FP8", tmp_path / "NVFP4"):
        layers = vllm_random.TINY["num_hidden_layers"]
        assert methods["MoqextModelOptMoEMethod"] == layers
        assert methods["MoqextModelOptLinearMethod"] == 2 * layers
        assert len({tuple(each) for each in tokens}) == 3


def test_what_is_loaded_is_still_looked_at():
    """Without that format nothing counts as filled."""
    import torch

    from moqext_vllm.dummies import make_up
    from moqext_vllm.parameters import is_marked, marked

    param = torch.nn.Parameter(marked((3,), torch.float32), requires_grad=False)
    make_up("weight_scale", param)
    assert is_marked(param.data)
    assert not hasattr(param, "dummy_weight_value")
