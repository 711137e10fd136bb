"""Which layers cuBLASLt can run, on any machine, and where the library is looked for."""

import os
import subprocess
import sys
import textwrap

import pytest

from moqext import _C

from ..work import each

NAME = "cuda:cublaslt"
FUNCTIONS = (
    "Create",
    "GetStatusName",
    "Matmul",
    "MatmulAlgoGetHeuristic",
    "MatmulDescInit_internal",
    "MatmulDescSetAttribute",
    "MatmulPreferenceInit_internal",
    "MatmulPreferenceSetAttribute",
    "MatrixLayoutInit_internal",
)


def reason(
    algo="FP8", columns=4096, rows=(4096,), capability="9.0", dtype="bfloat16", compute="exact", **options
):
    """Why it cannot, on a chip that need not be here, or None."""
    plan = _C.linear_plan(
        algo, columns, rows, None, dtype, "cuda:0", compute, capability=capability, **options
    )
    return dict(plan.explain())[NAME]


@each("rows", [(16,), (48, 16), (4096, 1024, 1024)])
@each("dtype", ["bfloat16", "float16"])
@each("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"])
def test_runs_fp8_on_hopper(algo, dtype, rows):
    assert reason(algo, 16, rows, dtype=dtype) is None
    assert reason(algo, 7168, rows, dtype=dtype) is None


def test_runs_nvfp4_as_fp8_on_hopper():
    for dtype in ("bfloat16", "float16"):
        assert reason("NVFP4", 7168, (48, 7, 9), compute="fp8", dtype=dtype) is None
    assert "out_features" in reason("NVFP4", 7168, (48, 7), compute="fp8")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"columns": 40}, "in_features to be a multiple of 16, got 40"),
        ({"rows": (24,)}, "out_features to be a multiple of 16, got 24"),
        ({"rows": (24, 8)}, "each of out_partitions to be a multiple of 16, got 24"),
        ({"algo": "FP8_PB_WO", "rows": (24, 8)}, "each of out_partitions to be a multiple of 16, got 24"),
        ({"algo": "NVFP4"}, "multiplies FP8 weights, NVFP4 with compute exact has others"),
        (
            {"algo": "NVFP4", "compute": "fp4"},
            "multiplies FP8 weights, NVFP4 with compute fp4 has others",
        ),
        ({"dtype": "float32"}, "float32 outputs ask for 1e-5"),
        ({"capability": "8.0"}, "FP8 needs compute capability 8.9, this device has 8.0"),
        (
            {"algo": "FP8_PB_WO", "capability": "8.9"},
            "block scales needs compute capability 9.0, this device has 8.9",
        ),
        (
            {"algo": "FP8_PB_WO", "capability": "10.0"},
            "block scales needs compute capability 9.0, this device has 10.0",
        ),
    ],
)
def test_refuses_the_others_by_name(options, text):
    assert text in reason(**options)


def test_partitions_multiplied_as_one_may_have_any_size():
    assert reason("FP8_PER_CHANNEL_PER_TOKEN", rows=(128, 8, 8)) is None
    assert reason("FP8_PB_WO", rows=(128, 256, 16)) is None


@pytest.mark.parametrize("capability", ["8.9", "10.0", "12.0"])
@pytest.mark.parametrize("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_tensor_and_token_scales_run_on_other_chips(algo, capability):
    assert reason(algo, capability=capability) is None


def test_partitions_that_share_an_input_scale_may_have_any_size():
    assert reason(rows=(24, 8), one_input_scale=True) is None


# ---- the library ----

needs_build = pytest.mark.skipif(not _C.build_info()["cuda"], reason="moqext was built without CUDA")


def find(*lines, **environment):
    """Runs `lines` in a fresh process and tells what it finds: (path, version, reason)."""
    code = "\n".join([*lines, "from moqext import _C", "print(*_C.cublaslt(), sep='|')"])
    kept = {name: value for name, value in os.environ.items() if name not in ("CUDA_PATH", "CUDA_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip().split("|")


@pytest.fixture
def library(tmp_path):
    """Makes a library that has cuBLASLt's functions, but for `without`, and a version."""

    def make(directory, version=130500, without=()):
        path = tmp_path / directory / "libcublasLt.so.13"
        path.parent.mkdir(parents=True)
        source = path.with_name("fake.c")
        names = [name for name in FUNCTIONS if name not in without]
        lines = [f"void cublasLt{name}(void) {{}}" for name in names]
        source.write_text("\n".join([*lines, f"long cublasLtGetVersion(void) {{ return {version}; }}"]))
        soname = "-Wl,-soname,libcublasLt.so.13"
        subprocess.run(["cc", "-shared", "-fPIC", soname, "-o", path, source], check=True)
        return path

    return make


@needs_build
def test_the_order_of_places(library, tmp_path):
    chosen, loaded = library("chosen", 130200), library("loaded", 130300)
    below = library("site/nvidia/cu13/lib", 130400)
    home = library("home/lib64", 130500)
    path = f"import sys; sys.path.append({str(tmp_path / 'site')!r})"
    load = f"import ctypes; ctypes.CDLL({str(loaded)!r})"
    environment = {"CUDA_HOME": str(tmp_path / "home"), "MOQEXT_CUBLASLT": ""}
    assert find(path, load, **environment | {"MOQEXT_CUBLASLT": str(chosen)})[:2] == [
        str(chosen),
        "(13, 2, 0)",
    ]
    assert find(path, load, **environment)[:2] == [str(loaded), "(13, 3, 0)"]
    assert find("import sys; sys.path.insert(0, 5)", path, **environment)[:2] in (
        [str(below), "(13, 4, 0)"],
        find(**environment)[:2],  # one of pip's packages stands before ours
    )
    if find(MOQEXT_CUBLASLT="")[0] == "None":
        assert find(**environment)[:2] == [str(home), "(13, 5, 0)"]


@needs_build
def test_a_library_that_cannot_be_used_is_refused_with_the_reason(library, tmp_path):
    absent = tmp_path / "libcublasLt.so"
    assert f"cannot be opened: {absent}" in find(MOQEXT_CUBLASLT=str(absent))[2]
    part = library("part", without=["Matmul"])
    assert find(MOQEXT_CUBLASLT=str(part)) == ["None", "None", "cuBLASLt has no cublasLtMatmul"]
    old = library("old", version=120900)
    assert find(MOQEXT_CUBLASLT=str(old))[2] == "cuBLASLt is version 12.9.0, moqext needs 13"


@needs_build
def test_what_was_not_found_is_looked_for_again(library):
    good = library("good")
    lines = textwrap.dedent(f"""
        import os
        from moqext import _C
        assert _C.cublaslt()[2]
        os.environ["MOQEXT_CUBLASLT"] = {str(good)!r}""")
    assert find(lines, MOQEXT_CUBLASLT="/nonexistent")[:2] == [str(good), "(13, 5, 0)"]


def test_neither_import_nor_the_cpu_open_it():
    code = """
import numpy as np
from moqext import LinearMethod
m = LinearMethod("FP8", 16, [16], dtype="float32")
m(np.ones((1, 16), np.float32), m.prepare({"weight": np.ones((16, 16), np.uint8), "weight_scale": 1.0}))
m.explain()
assert "cublasLt" not in open("/proc/self/maps").read()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_build_without_cuda_says_so():
    if _C.build_info()["cuda"]:
        pytest.skip("built with CUDA")
    path, version, text = _C.cublaslt()
    assert (path, version) == (None, None)
    assert text.startswith("moqext was built without CUDA: ")


FP4 = "cuda:cublaslt_fp4"


def fp4_reason(columns=4096, rows=(4096,), compute="fp4", capability="10.0", dtype="bfloat16"):
    plan = _C.linear_plan("NVFP4", columns, rows, None, dtype, "cuda:0", compute, capability=capability)
    return dict(plan.explain())[FP4]


def test_products_of_nvfp4_codes_run_from_blackwell_on():
    for capability in ("10.0", "10.3", "12.0"):
        assert fp4_reason(capability=capability) is None
        assert fp4_reason(4128, (16, 48, 4096), capability=capability, dtype="float16") is None
    assert fp4_reason(capability="9.0") == "needs compute capability 10.0 or later, this device has 9.0"
    assert "in_features to be a multiple of 32, got 4112" in fp4_reason(4112)
    assert "each of out_partitions to be a multiple of 16, got 40" in fp4_reason(rows=(64, 40))
    assert "float32" in fp4_reason(dtype="float32")
    for compute in ("exact", "fp8"):
        assert f"with compute {compute}" in fp4_reason(compute=compute)


def test_what_multiplies_nvfp4_activations_on_each_chip():
    for capability, kernel in (("9.0", "cuda:simt"), ("10.0", FP4), ("12.0", FP4)):
        plan = _C.linear_plan(
            "NVFP4", 4096, (4096,), None, "bfloat16", "cuda:0", "fp4", capability=capability
        )
        assert {plan.backend(tokens) for tokens in (1, 64, 4096)} == {kernel}
    plan = _C.linear_plan("NVFP4", 4112, (64,), None, "bfloat16", "cuda:0", "fp4", capability="10.0")
    assert plan.backend(1) == "cuda:simt"


def test_what_has_not_run_on_hardware_says_so():
    plan = _C.linear_plan("NVFP4", 64, (64,), None, "bfloat16", "cuda:0", "fp4", capability="10.0")
    assert dict(plan.notes())[FP4] == "not yet run on hardware"


def test_block_scales_are_prepared_as_products_read_them():
    plan = _C.linear_plan("NVFP4", 96, (130, 16), None, "bfloat16", "cuda:0", "fp4", capability="10.0")
    shapes = {name: shape for name, shape, *_ in plan.prepared_params()}
    assert shapes["weight"] == (146, 48)
    assert shapes["weight_scale"] == (384, 8)  # each partition in tiles of its own
