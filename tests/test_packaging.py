"""The build and what it installs: one exported symbol, an abi3 tag, no driver; MOQEXT_CUDA as documented."""

import fcntl
import importlib.metadata
import os
import pty
import re
import runpy
import shutil
import struct
import subprocess
import sys
import termios
import threading
import tomllib
from contextlib import suppress
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


def build(tree, tmp_path, run=run, **env):
    """Builds in `tmp_path` with no CUDA to be found but what `env` names; returns exit status and output."""
    tools = tmp_path / "path"
    tools.mkdir(exist_ok=True)
    for name in ("cc", "gcc", "ld", "as", "git", "sh"):
        if shutil.which(name) and not (tools / name).is_symlink():
            (tools / name).symlink_to(shutil.which(name))
    clean = {"MOQEXT_CUDA": None, "MOQEXT_CUDA_HOME": None, "MOQEXT_CUDA_ARCHS": None, "CUDA_HOME": None}
    clean |= {"CUDA_PATH": None, "MOQEXT_SANITIZE": None, "MOQEXT_WERROR": None, "MOQEXT_RACECHECK": None}
    clean |= {"PATH": str(tools), "MOQEXT_VERBOSE": "1"}
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
    status, output = build(tree, tmp_path, MOQEXT_CUDA_HOME=str(home), MOQEXT_CUDA_ARCHS="90a")
    assert status != 0
    assert f"{home / 'bin' / 'nvcc'} cannot be run" in output


@needs_compiler
def test_nvcc_without_a_runtime_is_an_error(tree, tmp_path):
    home = fake_nvcc(tmp_path / "toolkit", "exit 0")
    status, output = build(tree, tmp_path, MOQEXT_CUDA_HOME=str(home), MOQEXT_CUDA_ARCHS="90a")
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
    toolkit = {"MOQEXT_CUDA_HOME": str(home), "MOQEXT_CUDA_ARCHS": "90a"}
    status, output = build(tree, tmp_path, MOQEXT_CUDA="auto", **toolkit)
    assert status != 0
    assert "nvcc fatal: broken" in output
    assert "nvcc failed on csrc/cuda/" in output
    assert not (tmp_path / "lib").exists()


# ------------------------------------------------------------------------- what is compiled, and when


FAKE_COMPILER = """\
for argument in "$@"; do
    case "$before" in
    -o) echo object > "$argument" ;;
    -MF) depends=$argument ;;
    -c) source=$argument ;;
    esac
    before=$argument
done
[ -z "$depends" ] || echo "x.o: $source" > "$depends"
"""


@pytest.fixture
def fakes(tmp_path):
    """Environment of builds whose compilers only make empty objects; with a toolkit of that kind."""
    home = fake_nvcc(tmp_path / "toolkit", FAKE_COMPILER)
    (home / "lib64").mkdir()
    (home / "lib64" / "libcudart_static.a").touch()
    cc = fake_nvcc(tmp_path / "host", FAKE_COMPILER) / "bin" / "nvcc"
    link = f"{cc} -shared"
    return {"CC": str(cc), "LDSHARED": link, "MOQEXT_CUDA_HOME": str(home), "MOQEXT_CUDA_ARCHS": "80;90a"}


@pytest.fixture
def sketch(tmp_path):
    """A tree of a few sources, which is enough for compilers that do not read them."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / "sketch").mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "sketch")
    for name in (
        "core/status.c",
        "binding/info.c",
        "binding/args.c",
        "cuda/absent.c",
        "cuda/runtime/devices.cu",
        "cuda/sm90/gemm.cu",
        "cuda/sm90/gemm.c",
    ):
        place = tmp_path / "sketch" / "csrc" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    (tmp_path / "sketch" / "moqext").mkdir()
    (tmp_path / "sketch" / "python").mkdir()
    return tmp_path / "sketch"


def compiled(result):
    """The sources that a build has compiled, which it counts."""
    status, output = result
    assert status == 0, output
    lines = re.findall(r"^\[ *(\d+)/(\d+)\] (\S+) [\d.]+ s$", output, re.MULTILINE)
    assert [int(count) for count, _, _ in lines] == list(range(1, len(lines) + 1))
    assert {int(total) for _, total, _ in lines} <= {len(lines)}
    return sorted(source for _, _, source in lines)


def on_a_terminal(command, cwd, **env):
    """Like `run`, with the standard output on a terminal of 60 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    written = []

    def read():
        with suppress(OSError):  # Linux's answer when the other side is closed
            while part := os.read(ours, 65536):
                written.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    merged = {
        key: value for key, value in {**os.environ, "TERM": "xterm", **env}.items() if value is not None
    }
    merged.pop("COLUMNS", None)
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=merged, stdout=theirs, stderr=subprocess.PIPE, text=True
    )
    os.close(theirs)
    reader.join()
    os.close(ours)
    output = b"".join(written).decode().replace("\r\n", "\n")
    return subprocess.CompletedProcess(command, done.returncode, output, done.stderr)


WRITES = "echo 'note: hello' >&2; echo 'second line'\n"
"""Output of a compiler, two lines."""


@needs_compiler
def test_a_terminal_has_one_line_that_is_rewritten(sketch, tmp_path, fakes):
    status, output = build(sketch, tmp_path, run=on_a_terminal, MOQEXT_VERBOSE=None, **fakes)
    assert status == 0, output
    bars = re.findall(r"\r\x1b\[K(moqext: \[[#.]+\] (\d+)/6 [^\r\n]*)", output)
    assert [int(count) for _, count in bars] == list(range(7))
    assert max(len(line) for line, _ in bars) < 60
    before, after = output.split("\r\x1b[Kmoqext: compiled 6 files in ")
    assert "\n" not in before[before.index("[") :]
    assert "\x1b" not in after
    assert build(sketch, tmp_path, run=on_a_terminal, MOQEXT_VERBOSE=None, **fakes)[1].count("\x1b") == 0


@needs_compiler
def test_a_pipe_has_no_line_for_each_file(sketch, tmp_path, fakes):
    status, output = build(sketch, tmp_path, MOQEXT_VERBOSE=None, **fakes)
    assert status == 0, output
    assert re.search(r"^moqext: compiled 6 files in \d+ s$", output, re.MULTILINE)
    assert not re.search(r"core/status\.c\b(?!\.o)", output)
    assert "\r" not in output


@needs_compiler
@pytest.mark.parametrize("where", [run, on_a_terminal])
def test_what_compilers_say_is_whole(sketch, tmp_path, fakes, where):
    """Warnings follow the name of their file, an error ends the build; neither is in the line of the bar."""
    host = Path(fakes["CC"])
    host.write_text(f"#!/bin/sh\n{FAKE_COMPILER}{WRITES}")
    status, output = build(sketch, tmp_path, run=where, MOQEXT_VERBOSE=None, **fakes)
    assert status == 0, output
    assert len(re.findall(r"^(?:\r\x1b\[K|.*\x1b\[K)?\S+\.c:\n", output, re.MULTILINE)) == 4
    assert output.count("note: hello\nsecond line\n") == 4
    host.write_text(f"#!/bin/sh\n{WRITES}exit 1\n")
    (sketch / "csrc/core/status.c").write_text("int changed;\n")
    status, output = build(sketch, tmp_path, run=where, MOQEXT_VERBOSE=None, **fakes)
    assert status != 0
    assert "note: hello\nsecond line\n" in output
    assert "nvcc failed on csrc/core/status.c" in output


@needs_compiler
def test_every_cuda_build_has_cublaslt_without_its_header(tree, tmp_path, fakes):
    sources = compiled(build(tree, tmp_path, **fakes))
    assert {path for path in sources if "cublaslt" in path and "binding" not in path} == {
        "csrc/cuda/linear/linear_cublaslt.c",
        "csrc/cuda/linear/linear_cublaslt.cu",
        "csrc/cuda/linear/linear_cublaslt_general.c",
        "csrc/cuda/linear/linear_cublaslt_general.cu",
        "csrc/cuda/runtime/cublaslt.cu",
        "csrc/cuda/runtime/cublaslt_matmul.cu",
    }
    included = re.compile(r"#\s*include\s*[<\"]cublas")
    assert [path for path in (ROOT / "csrc").rglob("*.*") if included.search(path.read_text())] == []


@needs_compiler
def test_flavours_of_a_build_keep_their_objects(sketch, tmp_path, fakes):
    """Each flavour is compiled once, however often builds take turns; shared objects by the first alone."""
    flavours = [
        {},
        {"MOQEXT_CUDA": "0"},
        {"MOQEXT_WERROR": "1"},
        {"MOQEXT_SANITIZE": "1", "MOQEXT_CUDA": "0"},
        {"MOQEXT_CUDA_ARCHS": "90a"},
        {"MOQEXT_RACECHECK": "1", "MOQEXT_CUDA_ARCHS": "90a"},
    ]
    first = [compiled(build(sketch, tmp_path, **(fakes | flavour))) for flavour in flavours]
    cuda, c_files = ([path for path in first[0] if path.endswith(end)] for end in (".cu", ".c"))
    assert {"csrc/cuda/sm90/gemm.c", "csrc/cuda/sm90/gemm.cu"} <= set(first[0])  # objects of their own
    assert first[1] == ["csrc/cuda/absent.c"]
    assert first[2] == c_files
    assert first[3] == sorted([*c_files, "csrc/cuda/absent.c"])
    assert first[4] == [path for path in cuda if "/sm90/" not in path]
    assert first[5] == cuda
    assert [compiled(build(sketch, tmp_path, **(fakes | flavour))) for flavour in flavours] == [[]] * 6


def test_another_place_of_numpy_compiles_nothing_again(sketch, tmp_path, fakes):
    """pip's isolated builds have a copy of NumPy each; another version does compile the binding again."""
    found = []
    for place, version in (("one", "2.1.0"), ("two", "2.1.0"), ("three", "2.2.0")):
        package = tmp_path / place / "numpy"
        package.mkdir(parents=True)
        package.joinpath("__init__.py").write_text(
            f"__version__ = {version!r}\ndef get_include(): return {str(package)!r}\n"
        )
        found.append(compiled(build(sketch, tmp_path, PYTHONPATH=str(package.parent), **fakes)))
    assert found[1] == []
    assert found[2] == [path for path in found[0] if path.startswith("csrc/binding/")]


@needs_compiler
def test_sources_are_found_in_rooms_of_a_floor(sketch, tmp_path, fakes):
    """A C file of csrc/cuda is part of every build, with nvcc and without; absent*.c of those without."""
    for path in ("core/room/plain.c", "cuda/choice/costs.c", "cuda/room/kernel.cu"):
        (sketch / "csrc" / path).parent.mkdir(parents=True, exist_ok=True)
        (sketch / "csrc" / path).touch()
    new = {"csrc/core/room/plain.c", "csrc/cuda/choice/costs.c"}
    with_nvcc = set(compiled(build(sketch, tmp_path, **fakes)))
    assert with_nvcc >= new | {"csrc/cuda/room/kernel.cu"}
    assert "csrc/cuda/absent.c" not in with_nvcc
    (tmp_path / "without").mkdir()
    without = set(compiled(build(sketch, tmp_path / "without", **(fakes | {"MOQEXT_CUDA": "0"}))))
    assert without >= new | {"csrc/cuda/absent.c"}
    assert not [path for path in without if path.endswith(".cu")]


# ------------------------------------------------------------------------- for the GPUs of this machine


FAKE_DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return flags != 0; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Chip", size); return device < 0; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    *value = which == 75 ? MAJOR : which == 76 ? MINOR : -1;
    return device < 0;
}
"""


def driver(tmp_path, capability):
    """The environment in which libcuda.so.1 shows one GPU of that capability, or none."""
    place = tmp_path / "driver"
    place.mkdir()
    (place / "cuda.c").write_text(FAKE_DRIVER)
    major, minor = capability or (0, 0)
    facts = [f"-DCOUNT={int(bool(capability))}", f"-DMAJOR={major}", f"-DMINOR={minor}"]
    done = run(["gcc", "-shared", "-fPIC", *facts, "-o", place / "libcuda.so.1", place / "cuda.c"])
    assert done.returncode == 0, done.stderr
    return {"LD_LIBRARY_PATH": str(place), "MOQEXT_CUDA_ARCHS": None}


@pytest.fixture(scope="module")
def setup_py():
    """Definitions of setup.py, without a build."""
    pytest.importorskip("setuptools", minversion="77")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["setup.py", "-q", "--name"])
        patch.chdir(ROOT)
        return runpy.run_path(str(ROOT / "setup.py"))


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((7, 5), None),
        ((8, 0), "80"),
        ((8, 6), "80"),
        ((8, 9), "89"),
        ((9, 0), "90a"),
        ((10, 0), "100f"),
        ((10, 3), "100f"),
        ((11, 0), "89-virtual"),
        ((12, 1), "120f"),
        ((13, 0), "89-virtual"),
    ],
)
def test_a_gpu_gets_the_closest_architecture(setup_py, capability, arch):
    assert setup_py["arch_of_gpu"](*capability) == arch


def test_several_gpus_get_each_architecture_once(setup_py):
    gpus = [("H200", 9, 0), ("Old", 7, 5), ("A100", 8, 0), ("H200", 9, 0)]
    assert setup_py["native_archs"](gpus) == ("80;90a", "H200, A100")


@needs_compiler
def test_the_gpu_that_is_there_is_what_a_build_is_for(sketch, tmp_path, fakes):
    status, output = build(sketch, tmp_path, **(fakes | driver(tmp_path, (9, 0))))
    assert status == 0, output
    assert output.count("moqext: building for this machine alone: Chip (90a)") == 1
    assert (tmp_path / "temp" / "cuda-90a" / "csrc" / "cuda" / "runtime" / "devices.cu.o").is_file()


@needs_compiler
def test_without_a_gpu_a_build_is_for_the_cpu_and_says_how_else(sketch, tmp_path, fakes):
    none = fakes | driver(tmp_path, None)
    reason = "there was no GPU that it runs on; MOQEXT_CUDA_ARCHS=all builds for every GPU"
    for wish in ({}, {"MOQEXT_CUDA_ARCHS": "native"}):
        status, output = build(sketch, tmp_path, **(none | wish))
        assert status == 0, output
        assert output.count(f"CPU-only build ({reason})") == 1
    status, output = build(sketch, tmp_path, **(none | {"MOQEXT_CUDA": "1", "MOQEXT_CUDA_ARCHS": "native"}))
    assert status != 0
    assert reason in output


@needs_compiler
@pytest.mark.parametrize("wish", [{"MOQEXT_CUDA_ARCHS": "all"}, {"MOQEXT_CUDA": "1"}])
def test_every_architecture_is_built_by_name_or_where_an_image_demands_cuda(sketch, tmp_path, fakes, wish):
    status, output = build(sketch, tmp_path, **(fakes | driver(tmp_path, None) | wish))
    assert status == 0, output
    assert "CUDA (80;89;90a;100f;120f;89-virtual;" in output


@needs_compiler
def test_a_check_compiles_each_file_to_ptx_of_one_chip_fast(sketch, tmp_path, fakes):
    status, output = build(sketch, tmp_path, **(fakes | {"MOQEXT_CUDA_ARCHS": "check"}))
    assert status == 0, output
    assert "built version" in output
    assert "CUDA (check;" in output
    for source, arch in (("runtime/devices", "89"), ("sm90/gemm", "90a")):
        command = next(line for line in output.splitlines() if f" -c csrc/cuda/{source}.cu " in line)
        assert re.findall(r"-gencode=\S+", command) == [f"-gencode=arch=compute_{arch},code=compute_{arch}"]
        assert "-Ofc=max" in command
        assert (tmp_path / "temp" / "cuda-check" / "csrc" / "cuda" / f"{source}.cu.o").is_file()
    assert "-Ofc" not in build(sketch, tmp_path, **fakes)[1]


def test_variables_of_the_build_are_known_when_moqext_is_imported():
    """Each would be taken for one that nothing reads."""
    names = set(re.findall(r"MOQEXT_[A-Z_]+", (ROOT / "setup.py").read_text())) - {"MOQEXT_"}
    known = (ROOT / "csrc" / "ops" / "variables.c").read_text()
    assert [name for name in sorted(names) if f'"{name}"' not in known] == []


def test_an_old_setuptools_is_said_in_one_line(tree, tmp_path):
    package = tmp_path / "old" / "setuptools"
    (package / "command").mkdir(parents=True)
    package.joinpath("__init__.py").write_text('__version__ = "65.5.0"\nExtension = setup = object\n')
    package.joinpath("command", "build_ext.py").write_text("build_ext = object\n")
    status, output = build(tree, tmp_path, PYTHONPATH=str(package.parent))
    assert status != 0
    assert len(output.splitlines()) == 1
    assert "building needs setuptools>=77, found 65.5.0" in output


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
    first = compiled(build(tmp_path / "tree", tmp_path, MOQEXT_CUDA="0"))
    assert "csrc/core/status.c" in first
    assert compiled(build(tmp_path / "tree", tmp_path, MOQEXT_CUDA="0")) == []
    (tmp_path / "tree" / "csrc" / "binding" / "args.h").touch()
    third = compiled(build(tmp_path / "tree", tmp_path, MOQEXT_CUDA="0"))
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
