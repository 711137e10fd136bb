"""Variables of the environment: a misspelt one is said once, with what is allowed."""

import os
import subprocess
import sys

import pytest

CHILD = """
import warnings
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    import moqext
    for _ in range(2):
        moqext.LinearMethod("FP8", 32, [8])
for warning in caught:
    print(warning.category.__name__, warning.message)
"""


def run(code: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("MOQEXT_")}
    return subprocess.run(
        [sys.executable, *options, "-c", code], env=own | variables, capture_output=True, text=True
    )


ISA = "expected portable, avx2, avx512, avx512bf16 or amx; it is ignored"
THREADS = "expected a number from 0 to 1024; it is ignored"
SWITCH = "expected 0 or 1; what does not begin with 0 counts as 1"


# Several variables are read by one process: starting it takes most of the time.
WRONG_VALUES = [
    {
        "MOQEXT_ISA": ("avx521", ISA),
        "MOQEXT_NUM_THREADS": ("fast", THREADS),
        "MOQEXT_PDL": ("off", SWITCH),
        "MOQEXT_SYNC": ("yes", SWITCH),
        "MOQEXT_CUBLASLT": (
            "/nowhere/libcublasLt.so",
            "expected the path of cuBLASLt; there is no such file",
        ),
    },
    {"MOQEXT_ISA": ("AVX2", ISA), "MOQEXT_NUM_THREADS": ("-3", THREADS)},
    {"MOQEXT_NUM_THREADS": ("4x", THREADS)},
    {"MOQEXT_NUM_THREADS": ("1025", THREADS)},
    {"MOQEXT_NUM_THREADS": ("99999999999999999999", THREADS)},
]


@pytest.mark.parametrize("wrong", WRONG_VALUES, ids=lambda wrong: " ".join(v for v, _ in wrong.values()))
def test_a_misspelt_value_is_said_once_with_what_is_allowed(wrong):
    done = run(CHILD, **{name: value for name, (value, _) in wrong.items()})
    expected = [f"RuntimeWarning {name}={value}: {text}" for name, (value, text) in wrong.items()]
    assert sorted(done.stdout.splitlines()) == sorted(expected), done.stderr


def test_a_misspelt_name_is_said_once_with_what_there_is():
    there = "MOQEXT_ISA, MOQEXT_NUM_THREADS, MOQEXT_KERNEL, MOQEXT_CUBLASLT, MOQEXT_PDL, MOQEXT_SYNC"
    hints = {
        "MOQEXT_NUM_THREAD": "; did you mean MOQEXT_NUM_THREADS?",
        "MOQEXT_NUMTHREADS": "; did you mean MOQEXT_NUM_THREADS?",
        "MOQEXT_IAS": "; did you mean MOQEXT_ISA?",
        "MOQEXT_FAST": "",
    }
    done = run(CHILD, **dict.fromkeys(hints, "1"))
    expected = [
        f"RuntimeWarning {name}: no variable of moqext; there are {there}{hints[name]}" for name in hints
    ]
    assert sorted(done.stdout.splitlines()) == sorted(expected), done.stderr


def test_right_values_and_names_of_builds_and_tests_are_not_mentioned():
    done = run(
        CHILD,
        MOQEXT_ISA="portable",
        MOQEXT_NUM_THREADS="2",
        MOQEXT_KERNEL="cpu:portable",
        MOQEXT_PDL="0",
        MOQEXT_SYNC="1",
        MOQEXT_CUBLASLT="libcublasLt.so.13",
        MOQEXT_CUDA="0",
        MOQEXT_CUDA_ARCHS="90a",
        MOQEXT_CUDA_HOME="/usr/local/cuda",
        MOQEXT_WERROR="1",
        MOQEXT_SANITIZE="1",
        MOQEXT_RACECHECK="1",
        MOQEXT_VERBOSE="1",
        MOQEXT_SEED="7",
        MOQEXT_EXAMPLES="9",
        MOQEXT_VLLM="0",
        MOQEXT_VLLM_EXCLUSION="modelopt",
        MOQEXT_VLLM_COMPUTE="auto",
        MOQEXT_VLLM_FAST_ACCUM="1",
        MOQEXT_VLLM_OPS="0",
        MOQEXT_VLLM_CHECK="0",
        MOQEXT_VLLM_FORCE="1",
        MOQEXT_VLLM_COMPRESSED_TENSORS="1",
        MOQEXT_SGLANG_FORCE="1",
        NOT_MOQEXT_X="1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert run(CHILD, MOQEXT_ISA="", MOQEXT_NUM_THREADS="", MOQEXT_KERNEL="").stdout == ""


def test_a_value_set_by_the_program_is_said_when_a_layer_is_made():
    code = """
import os, warnings, moqext
os.environ["MOQEXT_ISA"] = "avx3"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        moqext.LinearMethod("FP8", 32, [8])
assert [str(warning.message)[:15] for warning in caught] == ["MOQEXT_ISA=avx3"], caught
assert caught[0].filename == "<string>", caught[0].filename
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_what_is_ignored_leaves_the_default():
    code = "import moqext; from moqext import _C; print(moqext.num_threads(), _C.cpu_isa())"
    default = run(code).stdout
    for name, value in (("MOQEXT_NUM_THREADS", "4x"), ("MOQEXT_NUM_THREADS", "2000"), ("MOQEXT_ISA", "avx")):
        assert run(code, **{name: value}).stdout == default, (name, value)
    assert run(code, MOQEXT_NUM_THREADS="3").stdout.split()[0] == "3"
    assert run(code, MOQEXT_ISA="portable").stdout.split()[1] == "portable"


def test_a_misspelt_kernel_is_an_error_that_names_all():
    done = run("import moqext; moqext.LinearMethod('FP8', 32, [8])", MOQEXT_KERNEL="cpu:avx")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        'ValueError: MOQEXT_KERNEL: no kernel named "cpu:avx"; there are cpu:portable, cpu:avx2,'
    )
    assert last.endswith("cuda:sm120_nvfp4_block")


def test_bytes_that_are_no_text():
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={os.fsencode(k): os.fsencode(v) for k, v in os.environ.items()} | {b"MOQEXT_ISA": b"\xff"},
        capture_output=True,
    )
    assert rb"MOQEXT_ISA=\xff: expected portable" in done.stdout, done.stderr


def test_where_warnings_are_errors_the_import_says_why():
    done = run("import moqext", "-W", "error::RuntimeWarning", MOQEXT_ISA="avx")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"RuntimeWarning: MOQEXT_ISA=avx: {ISA}"
