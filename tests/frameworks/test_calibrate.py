"""`calibrate`: ModelOpt's input scales from the same batches, and models that load what `quantize` wrote."""

import numpy as np
import pytest

import moqext
from moqext.tools.quantize.scales import amax_of, input_scale, read_scales

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="5.16")
safetensors = pytest.importorskip("safetensors.torch")

import moqext_transformers  # noqa: E402

from ..quantize_files import CASES, cache_amax, input_amax, unquantized  # noqa: E402

CALIBRATED = [
    case
    for case in CASES
    if case.export.removeprefix("exports/")
    in (
        "deepseek_nvfp4",
        "fp8_bias_kvfp8",
        "fp8_lm_head",
        "gpt_oss_nvfp4",
        "llama4_fp8",
        "mixtral_fp8",
        "nemotron_h_nvfp4",
        "nvfp4_mlp_only",
        "qwen3moe_mixed",
        "w4a8_nvfp4_fp8",
    )
]
SAME_FILES = [
    case
    for case in CASES
    if case.export
    in ("exports/nvfp4_mlp_only", "exports/mixtral_fp8", "exports/qwen3moe_mixed", "exports/mxfp8")
]
BF16_STEPS = 2.0**-5
"""Processors sum in another order, and a layer hands on what it rounded to bfloat16: four steps of 2^-7."""


def batches():
    """Token ids, the same as in tests/data/make_checkpoints.py."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 32, (2, 12), generator=generator) for _ in range(4)]


def loaded(case, folder, **options):
    """The unquantized model of a case."""
    unquantized(case, folder)
    if "nemotron" in case.export:  # Transformers calls the table otherwise than when it was saved
        state = safetensors.load_file(folder / "model.safetensors")
        state["backbone.embeddings.weight"] = state.pop("backbone.embedding.weight")
        safetensors.save_file(state, folder / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    return model.eval()


@pytest.mark.parametrize("case", CALIBRATED, ids=lambda case: case.export)
def test_scales_of_genuine_exports_from_the_same_batches(case, tmp_path):
    model = loaded(case, tmp_path / "in")
    amax = moqext_transformers.calibrate(model, batches(), tmp_path / "scales.json")
    assert read_scales(tmp_path / "scales.json") == amax
    with moqext.Checkpoint(case.directory) as export:
        expected = {name: export.layer(name).quant_algo for name in input_amax(case)}
        for module, algo in expected.items():
            suffix = "_" if f"{module}_input_scale" in export.tensors else "."
            genuine = np.float32(export.tensor(f"{module}{suffix}input_scale"))
            got = input_scale(amax_of(amax, module), algo)
            if module.endswith(("layers.0.self_attn.q_proj", "layers.0.self_attn.q_a_proj")):
                assert got == genuine
            assert abs(got - genuine) <= BF16_STEPS * genuine, module
        for module, genuine in cache_amax(case).items():
            if module.startswith("model.layers.0."):
                assert abs(amax[module] - genuine) <= BF16_STEPS / 4 * genuine, module
            assert abs(amax[module] - genuine) <= BF16_STEPS * genuine, module
        assert cache_amax(case).keys() <= {name for name in amax if name.endswith("_cache")}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_keys_and_values_are_watched_however_they_are_multiplied(attention, tmp_path):
    case = next(case for case in CASES if case.export == "exports/fp8_bias_kvfp8")
    model = loaded(case, tmp_path / "in", attn_implementation=attention)
    amax = moqext_transformers.calibrate(model, batches(), tmp_path / "scales.json")
    assert {name: amax[name] for name in cache_amax(case)} == pytest.approx(cache_amax(case), rel=BF16_STEPS)
    with moqext.Checkpoint(tmp_path / "in") as source:
        source.quantize(tmp_path / "out", to="NVFP4", scales=tmp_path / "scales.json", kv_cache="fp8")
    with moqext.Checkpoint(tmp_path / "out") as made:
        assert made.config.kv_cache_quant_algo == "FP8"
        assert len(made.kv_scales()) == 1
        assert not {"kv_scales_absent", "kv_scales_unannounced"} & {each.code for each in made.problems}


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_experts_are_watched_however_they_are_multiplied(implementation, tmp_path):
    case = next(case for case in CASES if case.export == "exports/mixtral_fp8")
    found = {}
    for name in ("eager", implementation):
        model = loaded(case, tmp_path / name, experts_implementation=name)
        found[name] = moqext_transformers.calibrate(model, batches())
        assert model.config._experts_implementation == name
    assert found["eager"].keys() == found[implementation].keys()
    container = "model.layers.0.block_sparse_moe.experts"
    assert {f"{container}.gate_up_proj", f"{container}.down_proj"} < found["eager"].keys()
    for module, value in found["eager"].items():
        assert abs(found[implementation][module] - value) <= BF16_STEPS * value, module


def test_the_largest_of_all_batches_counts_and_the_model_stays_as_it_was(tmp_path):
    case = next(case for case in CASES if case.export == "exports/fp8_bias_kvfp8")
    model = loaded(case, tmp_path / "in").train()
    each = [moqext_transformers.calibrate(model, [batch]) for batch in batches()]
    together = moqext_transformers.calibrate(model, ({"input_ids": batch} for batch in batches()))
    assert together == {module: max(one[module] for one in each) for module in together}
    assert model.training
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_what_cannot_be_calibrated(tmp_path):
    case = next(case for case in CASES if case.export == "exports/fp8_bias_kvfp8")
    model = loaded(case, tmp_path / "in")
    with pytest.raises(ValueError, match="batches: expected at least one, got none"):
        moqext_transformers.calibrate(model, [])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.bias.fill_(float("inf"))
    with pytest.raises(
        ValueError, match=r"model\.layers\.0\.mlp\.down_proj: activations are infinite or NaN"
    ):
        moqext_transformers.calibrate(model, batches())


@pytest.mark.parametrize("case", SAME_FILES, ids=lambda case: case.export)
def test_transformers_computes_with_the_files_what_it_does_with_genuine_ones(case, tmp_path):
    with moqext.Checkpoint(unquantized(case, tmp_path / "in")) as source:
        source.quantize(tmp_path / "out", to=case.to, rules=case.rules, scales=input_amax(case))
    ids = batches()[0]
    outputs = []
    for folder in (case.directory, tmp_path / "out"):
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not any(told.values())
        with torch.no_grad():
            outputs.append(model.eval()(ids).logits)
    assert torch.equal(*outputs)
