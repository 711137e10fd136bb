"""The build and what it installs: one exported symbol, an abi3 tag, no driver; MOQEXT_CUDA as documented."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import moqext
from moqext import _C

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTENSION = Path(_C.__file__)


def run(command, cwd=ROOT, **env):
    """Runs a command with the environment changed by `env`; None removes a variable."""
    merged = {**os.environ, **env}
    merged = {key: value for key, value in merged.items() if value is not None}
    merged.pop("LD_PRELOAD", None)  # compilers and interpreters started here are not sanitized
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=merged, capture_output=True, text=True
    )


def symbols(*options):
    """Names that `nm -D` lists for the extension."""
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    done = run(["nm", "-D", *options, EXTENSION])
    assert done.returncode == 0, done.stderr
    return [line.split()[-1] for line in done.stdout.splitlines()]


def test_exports_one_symbol():
    assert symbols("--defined-only", "--extern-only") == ["PyInit__C"]


def test_uses_only_the_stable_abi():
    """Names with a leading underscore are not in the limited API, but for those its macros need."""
    private = {name for name in symbols("--undefined-only") if re.match(r"_Py[A-Z_]", name)}
    assert private <= {
        "_Py_NoneStruct",
        "_Py_TrueStruct",
        "_Py_FalseStruct",
        "_Py_Dealloc",
        "_Py_NotImplementedStruct",
    }


def test_extension_is_abi3():
    assert EXTENSION.name == "_C.abi3.so"


def test_needs_no_cuda_library():
    """CUDA is linked statically, cuBLASLt and the driver are opened at run time."""
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", run(["readelf", "-d", EXTENSION]).stdout)
    assert "libc.so.6" in needed
    assert not [name for name in needed if re.match(r"lib(cuda|cublas|nv|stdc\+\+|torch|python)", name)]


def test_version_is_the_same_everywhere():
    assert moqext.__version__ == _C.build_info()["version"] == PYPROJECT["project"]["version"]
    try:
        distribution = importlib.metadata.distribution("moqext")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from a source tree, not from an installed package")
    assert distribution.version == moqext.__version__


def test_package_is_typed():
    package = Path(moqext.__file__).parent
    assert (package / "py.typed").is_file()
    assert (package / "_C.pyi").is_file()


def test_runtime_dependencies_are_few():
    names = {re.match(r"[\w-]+", entry)[0] for entry in PYPROJECT["project"]["dependencies"]}
    assert names <= {"numpy", "safetensors"}


def test_import_needs_no_device_and_no_framework():
    """A fresh interpreter that sees no GPU imports moqext, and nothing of a framework with it."""
    script = (
        "import sys, moqext, moqext._C; "
        "print(sorted(set(sys.modules) & {'torch', 'jax', 'transformers', 'vllm', 'cupy'}))"
    )
    home = str(Path(moqext.__file__).parent.parent)
    done = run([sys.executable, "-c", script], cwd="/", PYTHONPATH=home, CUDA_VISIBLE_DEVICES="")
    if "AddressSanitizer" in done.stderr or "ASan runtime" in done.stderr:
        pytest.skip("built with a sanitizer")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


# --------------------------------------------------------------------------------- the build's switches


@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """A copy of what the build reads, so that these tests write nothing beside the sources."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("csrc", "moqext", "python"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return copy


def fake_nvcc(home, body):
    """A toolkit whose nvcc is a shell script."""
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\n{body}\n")
    nvcc.chmod(0o755)
    return home


def build(tree, tmp_path, **env):
    """Builds in `tmp_path` with no CUDA to be found but what `env` names; returns exit status and output."""
    tools = tmp_path / "path"
    tools.mkdir()
    for name in ("cc", "gcc", "ld", "as", "git", "sh"):
        if shutil.which(name):
            (tools / name).symlink_to(shutil.which(name))
    clean = {"MOQEXT_CUDA": None, "MOQEXT_CUDA_HOME": None, "MOQEXT_CUDA_ARCHS": None, "CUDA_HOME": None}
    clean |= {"CUDA_PATH": None, "MOQEXT_SANITIZE": None, "PATH": str(tools)}
    command = [sys.executable, "setup.py", "build_ext", "-b", tmp_path / "lib", "-t", tmp_path / "temp"]
    done = run(command, cwd=tree, **(clean | env))
    return done.returncode, done.stdout + done.stderr


def no_toolkit_from_pip(piece="bin/nvcc"):
    return not any(Path(place, "nvidia", "cu13", piece).exists() for place in sys.path if place)


needs_compiler = pytest.mark.skipif(
    shutil.which("gcc") is None or np.__version__.startswith("1."), reason="needs gcc and headers of NumPy 2"
)


@needs_compiler
def test_wrong_switch_is_refused(tree, tmp_path):
    status, output = build(tree, tmp_path, MOQEXT_CUDA="yes")
    assert status != 0
    assert "MOQEXT_CUDA must be auto, 0 or 1, got 'yes'" in output


@needs_compiler
@pytest.mark.skipif(not no_toolkit_from_pip(), reason="pip has installed a toolkit")
def test_demanded_cuda_without_nvcc_is_an_error(tree, tmp_path):
    status, output = build(tree, tmp_path, MOQEXT_CUDA="1")
    assert status != 0
    assert "MOQEXT_CUDA=1, but nvcc was not found" in output
    assert not (tmp_path / "lib").exists()


@needs_compiler
def test_wrong_cuda_home_is_an_error_and_not_a_cpu_build(tree, tmp_path):
    status, output = build(tree, tmp_path, MOQEXT_CUDA_HOME=str(tmp_path / "nowhere"))
    assert status != 0
    assert "nowhere has no bin/nvcc" in output


@needs_compiler
def test_nvcc_that_cannot_start_is_an_error(tree, tmp_path):
    home = fake_nvcc(tmp_path / "toolkit", "")
    (home / "bin" / "nvcc").write_bytes(b"\x7fELF nonsense")
    status, output = build(tree, tmp_path, MOQEXT_CUDA_HOME=str(home))
    assert status != 0
    assert f"{home / 'bin' / 'nvcc'} cannot be run" in output


@needs_compiler
def test_nvcc_without_a_runtime_is_an_error(tree, tmp_path):
    home = fake_nvcc(tmp_path / "toolkit", "exit 0")
    status, output = build(tree, tmp_path, MOQEXT_CUDA_HOME=str(home))
    if "libcudart_static.a" not in output and not no_toolkit_from_pip():
        pytest.skip("pip's packages completed the toolkit")
    assert status != 0
    assert "no libcudart_static.a" in output


@needs_compiler
def test_failing_nvcc_is_an_error_and_not_a_cpu_build(tree, tmp_path):
    home = fake_nvcc(tmp_path / "toolkit", "echo 'nvcc fatal: broken' >&2; exit 1")
    (home / "lib64").mkdir()
    (home / "lib64" / "libcudart_static.a").touch()
    (tmp_path / "fake").mkdir()
    status, output = build(tree, tmp_path, MOQEXT_CUDA="auto", MOQEXT_CUDA_HOME=str(home))
    assert status != 0
    assert "nvcc fatal: broken" in output
    assert "nvcc failed on csrc/cuda/" in output
    assert not (tmp_path / "lib").exists()


@needs_compiler
def test_toolkit_without_cublaslt_is_said_in_one_line(tree, tmp_path):
    home = fake_nvcc(tmp_path / "toolkit", "exit 1")
    (home / "lib64").mkdir()
    (home / "lib64" / "libcudart_static.a").touch()
    without = build(tree, tmp_path, MOQEXT_CUDA_HOME=str(home))[1]
    (home / "include").mkdir()
    (home / "include" / "cublasLt.h").touch()
    (tmp_path / "again").mkdir()
    complete = build(tree, tmp_path / "again", MOQEXT_CUDA_HOME=str(home))[1]
    if no_toolkit_from_pip("include/cublasLt.h"):
        assert len([line for line in without.splitlines() if "no cublasLt.h" in line]) == 1
    assert "no cublasLt.h" not in complete


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not no_toolkit_from_pip(), reason="pip has installed a toolkit")
@pytest.mark.parametrize(
    ("wish", "reason"), [("auto", "nvcc not found"), ("0", "MOQEXT_CUDA=0"), (None, "nvcc not found")]
)
def test_without_cuda_the_build_is_cpu_only_and_says_so(tree, tmp_path, wish, reason):
    status, output = build(tree, tmp_path, MOQEXT_CUDA=wish)
    assert status == 0, output
    assert f"moqext: CPU-only build ({reason})" in output
    built = (tmp_path / "lib" / "moqext" / "_C.abi3.so").read_bytes()
    assert f"moqext was built without CUDA: {reason}\0".encode() in built


@pytest.mark.slow
@needs_compiler
def test_nothing_is_compiled_twice(tree, tmp_path):
    """A second build compiles nothing; a changed header only what includes it."""
    shutil.copytree(tree, tmp_path / "tree")
    compiled = re.compile(r" -c (csrc/\S+) -o ")
    (tmp_path / "a").mkdir()
    first = build(tmp_path / "tree", tmp_path / "a", MOQEXT_CUDA="0")[1]
    assert "csrc/core/status.c" in compiled.findall(first)
    shutil.rmtree(tmp_path / "a" / "path")
    second = build(tmp_path / "tree", tmp_path / "a", MOQEXT_CUDA="0")[1]
    assert compiled.findall(second) == []
    (tmp_path / "tree" / "csrc" / "binding" / "args.h").touch()
    shutil.rmtree(tmp_path / "a" / "path")
    third = compiled.findall(build(tmp_path / "tree", tmp_path / "a", MOQEXT_CUDA="0")[1])
    assert "csrc/binding/args.c" in third
    assert all(path.startswith("csrc/binding/") for path in third)


@pytest.mark.slow
@needs_compiler
def test_sdist_is_complete_and_its_wheel_is_abi3(tmp_path):
    """An sdist, unpacked and built elsewhere, gives the cp311-abi3 wheel with the typed package in it."""
    pytest.importorskip("build")
    import tarfile
    import zipfile

    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--skip-dependency-check",
        "--outdir",
        tmp_path,
    ]
    done = run([*command, "--sdist", ROOT])
    assert done.returncode == 0, done.stdout + done.stderr
    archive = next(tmp_path.glob("*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "source", filter="data")
    source = next((tmp_path / "source").iterdir())
    tracked = run(["git", "ls-files"]).stdout.split()
    missing = [name for name in tracked if not (source / name).exists() and not name.startswith(".git")]
    assert missing == []
    done = run([*command, "--wheel", source], MOQEXT_CUDA="0")
    assert done.returncode == 0, done.stdout + done.stderr
    wheel = next(tmp_path.glob("*.whl"))
    assert re.fullmatch(r"moqext-[\d.]+-cp311-abi3-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"moqext/_C.abi3.so", "moqext/_C.pyi", "moqext/py.typed", "moqext/__init__.py"} <= set(names)
    assert all(name.split("/")[0].startswith("moqext") for name in names)


def test_sources_without_the_extension_say_what_is_missing(tmp_path):
    shutil.copytree(
        ROOT / "moqext", tmp_path / "moqext", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    done = run([sys.executable, "-c", "import moqext"], cwd=tmp_path, PYTHONSAFEPATH="", PYTHONPATH="")
    assert done.returncode == 1
    assert "native part of moqext, is not built" in done.stderr
    assert "setup.py build_ext --inplace" in done.stderr
    (tmp_path / "moqext" / "_C.abi3.so").write_bytes(b"no library")
    done = run([sys.executable, "-c", "import moqext"], cwd=tmp_path, PYTHONSAFEPATH="", PYTHONPATH="")
    assert done.returncode == 1
    assert "not built" not in done.stderr  # it is there: the loader's own reason tells more
    assert "_C.abi3.so" in done.stderr
