"""cublaslt_abi.h declares cuBLASLt as NVIDIA's header does and as its library takes it."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moqext import _C

ROOT = Path(__file__).resolve().parents[2]
ABI = (ROOT / "csrc" / "cuda" / "runtime" / "cublaslt_abi.h").read_text()

# Numbers are equal; a function has as many parameters, and each is a pointer, a float or an integer of
# equal size; opaque structures give the library at least what 13.0 asks for, and not more than this header.
COMPARISON = r"""
#include "cuda/runtime/cublaslt_abi.h"
#include <cublasLt.h>
#include <cstddef>
#include <type_traits>

#define NUMBER(name, value) static_assert(MOQ_##name == (int)name, #name);
MOQ_CUBLASLT_NUMBERS(NUMBER)

template <class A, class B> constexpr bool alike() {
    return sizeof(A) == sizeof(B) && std::is_pointer<A>::value == std::is_pointer<B>::value &&
           std::is_floating_point<A>::value == std::is_floating_point<B>::value;
}
template <class R, class... A, class S, class... B>
constexpr bool same_call(R (*)(A...), S (*)(B...)) {
    if constexpr (sizeof...(A) == sizeof...(B))
        return alike<R, S>() && (alike<A, B>() && ...);
    return false;
}
#define FUNCTION(name, result, parameters)                                                          \
    static_assert(same_call((result(*) parameters)nullptr, (decltype(&::name))nullptr), #name);
MOQ_CUBLASLT_FUNCTIONS(FUNCTION)

static_assert(MOQ_CUBLASLT_MAJOR == CUBLAS_VER_MAJOR, "major");
static_assert(sizeof(moq_cublaslt_product) <= sizeof(cublasLtMatmulDescOpaque_t), "product");
static_assert(sizeof(moq_cublaslt_matrix) <= sizeof(cublasLtMatrixLayoutOpaque_t), "matrix");
static_assert(sizeof(moq_cublaslt_preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "preference");
static_assert(sizeof(moq_cublaslt_algorithm) == sizeof(cublasLtMatmulAlgo_t), "algorithm");
typedef moq_cublaslt_proposal ours;
typedef cublasLtMatmulHeuristicResult_t theirs;
static_assert(sizeof(ours) == sizeof(theirs), "proposal");
static_assert(offsetof(ours, workspace_bytes) == offsetof(theirs, workspaceSize), "workspace");
static_assert(offsetof(ours, state) == offsetof(theirs, state), "state");
"""


def include_directories():
    """Folders with headers of CUDA on this machine: toolkits, and pip's nvidia-* packages."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH", "MOQEXT_CUDA_HOME")]
    homes += [
        *Path("/usr/local").glob("cuda*"),
        *(Path(place, "nvidia", "cu13") for place in sys.path if place),
    ]
    return [Path(home, "include") for home in homes if home and Path(home, "include").is_dir()]


def compile_against(directories, source, tmp_path):
    (tmp_path / "abi.cpp").write_text(source)
    include = [f"-I{path}" for path in (ROOT / "csrc", *directories)]
    return subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", *include, tmp_path / "abi.cpp"], capture_output=True, text=True
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_declarations_are_those_of_the_header(tmp_path):
    directories = include_directories()
    for header in ("cublasLt.h", "library_types.h"):
        if not any((path / header).is_file() for path in directories):
            pytest.skip(f"no {header} on this machine")
    done = compile_against(directories, COMPARISON, tmp_path)
    assert done.returncode == 0, done.stderr
    wrong = COMPARISON.replace(
        "MOQ_CUBLASLT_NUMBERS(NUMBER)",
        "NUMBER(CUBLASLT_MATMUL_DESC_TRANSA, 3) "
        'static_assert(MOQ_CUBLAS_OP_T == (int)CUBLAS_OP_N, "differs");',
    )
    assert "differs" in compile_against(directories, wrong, tmp_path).stderr


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_declarations_are_c(tmp_path):
    (tmp_path / "abi.c").write_text('#include "cuda/runtime/cublaslt_abi.h"\nmoq_cublaslt_api api;\n')
    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{ROOT / 'csrc'}"]
    done = subprocess.run([*command, tmp_path / "abi.c"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def room(name):
    """Bytes of an opaque structure."""
    return 8 * int(re.search(rf"uint64_t data\[(\d+)\];[^}}]*}} {name};", ABI)[1])


@pytest.mark.skipif(not _C.cublaslt()[0], reason="no cuBLASLt on this machine")
@pytest.mark.parametrize(
    ("function", "structure", "arguments"),
    [
        ("cublasLtMatmulDescInit_internal", "moq_cublaslt_product", (68, 0)),
        ("cublasLtMatmulPreferenceInit_internal", "moq_cublaslt_preference", ()),
        (
            "cublasLtMatrixLayoutInit_internal",
            "moq_cublaslt_matrix",
            (28, ctypes.c_uint64(64), ctypes.c_uint64(32), ctypes.c_int64(64)),
        ),
    ],
)
def test_the_library_takes_the_room_that_is_declared(function, structure, arguments):
    """The library says yes, and writes nothing behind the room it was given."""
    library, size = ctypes.CDLL(_C.cublaslt()[0]), room(structure)
    memory = (ctypes.c_uint8 * (size + 256))(*[0xA5] * (size + 256))
    assert getattr(library, function)(memory, ctypes.c_size_t(size), *arguments) == 0
    assert set(memory[size:]) == {0xA5}
