"""cuBLASLt is asked what it has when a layer is made: products, choices and reasons, by a stand-in for it."""

import subprocess

import pytest

from moqext import _C

from .stand_in import ROOT, SOURCE, StandIn

needs_build = pytest.mark.skipif(not _C.build_info()["cuda"], reason="moqext was built without CUDA")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return StandIn(tmp_path_factory.mktemp("stand_in"))


# ---- products, in any build ----

PRODUCTS = r"""
#include "cuda/runtime/cublaslt_api.h"
#include <stdio.h>

#define ADDRESS(name, result, parameters) extern "C" result name parameters;
MOQ_CUBLASLT_FUNCTIONS(ADDRESS)
#undef ADDRESS

moq_status moq_cublaslt_open(int32_t, void *, const moq_cublaslt_api **api, void **handle, moq_err *) {
#define MEMBER(name, result, parameters) name,
    static const moq_cublaslt_api API = {MOQ_CUBLASLT_FUNCTIONS(MEMBER)};
    *api = &API;
    *handle = nullptr;
    return MOQ_OK;
}

static void ask(moq_scaling scaling, bool fast, int64_t m, const float *alpha) {
    moq_matmul p = {};
    moq_err err;
    char message[MOQ_MESSAGE_SIZE];
    p.scaling = scaling;
    p.fast_accum = fast;
    p.alpha = alpha;
    p.m = m, p.n = 48, p.k = p.x_stride = 64, p.y_stride = 48;
    p.dtype = MOQ_DT_BF16;
    puts(moq_matmul_ask(&p, &err) == MOQ_OK ? "ok" : moq_err_message(&err, message));
}

int main() {
    float alpha[2] = {1, 0};
    ask(MOQ_SCALED_TENSOR, true, 16, nullptr);
    ask(MOQ_SCALED_TENSOR, false, 16, nullptr);
    for (int i = 0; i < 4; i++)
        ask(MOQ_SCALED_NVFP4, false, i < 2 ? 8 : 4096, alpha);
}
"""


@pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="needs the sources")
def test_products_are_described_as_they_are_documented(tmp_path, monkeypatch, library):
    """Fast sums for FP8 alone, where they are asked for; what the library lacks is asked once, too."""
    (tmp_path / "products.cpp").write_text(PRODUCTS)
    core = [f"{ROOT}/csrc/core/{name}.c" for name in ("status", "linear", "weight", "tensor")]
    objects = []
    for source in [*core, SOURCE]:
        objects.append(tmp_path / (source.split("/")[-1] if isinstance(source, str) else source.name))
        objects[-1] = objects[-1].with_suffix(".o")
        command = [
            "gcc",
            "-std=c11",
            "-ffunction-sections",
            f"-I{ROOT}/csrc",
            "-c",
            source,
            "-o",
            objects[-1],
        ]
        subprocess.run(command, check=True)
    flags = ["-std=c++17", "-fpermissive", "-w", "-ffunction-sections", f"-I{ROOT}/csrc"]
    product = [
        "-x",
        "c++",
        f"{ROOT}/csrc/cuda/runtime/cublaslt_matmul.cu",
        tmp_path / "products.cpp",
        "-x",
        "none",
    ]
    linked = ["-Wl,--gc-sections", "-Wl,--unresolved-symbols=ignore-all", "-lm", "-ldl", "-lpthread"]
    subprocess.run(["g++", *flags, *product, *objects, *linked, "-o", tmp_path / "products"], check=True)
    log = tmp_path / "asked.txt"
    monkeypatch.setenv("MOQEXT_STAND_IN_LOG", str(log))
    monkeypatch.setenv("MOQEXT_STAND_IN_LACKS", "fp4 1024 9999")
    done = subprocess.run([tmp_path / "products"], capture_output=True, text=True, check=True)
    refusal = (
        "cuBLASLt 13.5.0 has no algorithm for 4096 tokens times weight [48, 64] (CUBLAS_STATUS_NOT_SUPPORTED)"
    )
    assert done.stdout.splitlines() == ["ok"] * 4 + [refusal] * 2
    assert log.read_text().splitlines() == [
        "fp8 m=16 n=48 k=64 bias=0 wide=0 fast=1 pointers=0",
        "fp8 m=16 n=48 k=64 bias=0 wide=0 fast=0 pointers=0",
        "fp4 m=8 n=48 k=64 bias=0 wide=0 fast=0 pointers=1",
        "fp4 m=4096 n=48 k=64 bias=0 wide=0 fast=0 pointers=1",
    ]


# ---- choices, in a build with CUDA, whose chip need not be here ----

PLAN = """
from moqext import _C
def plan(algo, compute, rows=(4096, 1024), **options):
    about = (algo, 4096, rows, None, "bfloat16", "cuda:0", compute)
    return _C.linear_plan(*about, capability="10.0", pretend=True, **options)
def show(plan, *tokens):
    for m in tokens:
        print(m, plan.backend(m), plan.compute_for(m))
"""
FP4 = "cuda:cublaslt_fp4"


@needs_build
def test_a_layer_is_the_librarys_where_it_has_algorithms(library):
    out = library.run(f"{PLAN}show(plan('NVFP4', 'fp4'), 1, 700)")
    assert out.splitlines() == [f"1 {FP4} fp4", f"700 {FP4} fp4"]
    asked = library.asked()
    assert asked
    assert all(line.startswith("fp4") and line.endswith("fast=0 pointers=1") for line in asked)
    assert not any("bias=1" in line for line in asked)
    assert any("wide=1" in line for line in asked)
    assert {word for line in asked for word in line.split() if word[0] == "n"} == {"n=4096", "n=1024"}


@needs_build
def test_the_library_is_asked_once_about_a_number_of_tokens(library):
    library.run(f"{PLAN}p = plan('NVFP4', 'fp4')\nshow(p, 5, 5)\np.explain(5)\nshow(plan('NVFP4', 'fp4'), 5)")
    asked = library.asked()
    assert len(asked) == len(set(asked))
    assert sum("m=5 " in line for line in asked) == 4  # two partitions, in 16 bits and in float32


@needs_build
@pytest.mark.parametrize("form", ["", " wide"])
def test_a_layer_that_the_library_has_nothing_for_has_the_next_kernel(library, form):
    """With float32 sums it could not add a bias."""
    out = library.run(
        f"{PLAN}p = plan('NVFP4', 'fp4')\nshow(p, 1, 700)\nprint(dict(p.explain())['{FP4}'])\n"
        "show(plan('NVFP4', 'auto'), 1, 4096)",
        lacks=f"fp4 0 99999{form}",
    )
    lines = out.splitlines()
    assert lines[:2] == ["1 cuda:simt fp4", "700 cuda:simt fp4"]
    assert lines[2].startswith("cuBLASLt 13.5.0 has no algorithm for ")
    assert lines[2].endswith(" tokens times weight [4096, 4096] (CUBLAS_STATUS_NOT_SUPPORTED)")
    assert lines[3:] == ["1 cuda:sm80_nvfp4 exact", "4096 cuda:sm80_nvfp4 exact"]


@needs_build
def test_numbers_of_tokens_that_the_library_lacks_have_the_next_kernel(library):
    out = library.run(
        f"{PLAN}p = plan('NVFP4', 'fp4')\nshow(p, 16, 40, 4096)\n"
        f"print(dict(p.explain())['{FP4}'], dict(p.explain(16))['{FP4}'], dict(p.explain(40))['{FP4}'])",
        lacks="fp4 32 1023",
    )
    assert out.splitlines()[:3] == [f"16 {FP4} fp4", "40 cuda:simt fp4", f"4096 {FP4} fp4"]
    assert out.splitlines()[3].startswith("None None cuBLASLt 13.5.0 has no algorithm for 40 tokens")


@needs_build
def test_a_bias_that_the_library_does_not_add_to_fp8_is_seen_before(library):
    out = library.run(f"{PLAN}show(plan('FP8', 'exact'), 64)", lacks="fp8 0 99999 bias")
    assert out == "64 cuda:sm89_fp8 exact\n"
    assert (
        library.run(f"{PLAN}show(plan('FP8', 'exact', fast_accum=True), 4096)").split()[1] == "cuda:cublaslt"
    )
    assert all("fast=1" in line for line in library.asked())


@needs_build
def test_a_forced_kernel_is_refused_before_anything_runs(library):
    code = f"""{PLAN}
from moqext import UnsupportedQuantization
p = plan('NVFP4', 'fp4')
try:
    p.backend(40)
except UnsupportedQuantization as error:
    print(error)
"""
    out = library.run(code, lacks="fp4 32 1023", MOQEXT_KERNEL=FP4)
    assert out.startswith("no kernel can run 40 tokens of NVFP4 5120x4096")
    assert "has no algorithm" in out


@needs_build
def test_large_partitions_are_unpacked_in_parts(library):
    """Codes in the workspace are 128 MB at most; each part has tiles of scales of its own."""
    library.run(f"{PLAN}plan('NVFP4', 'auto', rows=(70000, 16))")
    assert {word for line in library.asked() for word in line.split() if word[0] == "n"} == {
        "n=65536",
        "n=4464",
        "n=16",
    }


@needs_build
def test_a_chip_that_is_only_named_is_not_asked_about(library):
    about = "'NVFP4', 512, [64], None, 'bfloat16', 'cuda:0', 'fp4', capability='10.0'"
    out = library.run(
        f"from moqext import _C\nprint(_C.linear_plan({about}).backend(1))", lacks="fp4 0 99999"
    )
    assert out == f"{FP4}\n"
    assert not library.asked()
