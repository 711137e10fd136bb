"""Builds the extension `moqext._C`: C with the host compiler, CUDA C with nvcc where there is one.

Every source is compiled once to an object below the build directory, several at a time; an object is
kept while its command, its source and the headers it includes have not changed. The host linker makes
the one shared library; nvcc never links.

Environment:
  MOQEXT_CUDA=auto|0|1     auto (default) compiles csrc/cuda when nvcc is found, 1 demands it
  MOQEXT_CUDA_ARCHS        default "80;89;90a;100f;120f;89-virtual"; sm90_*.cu are compiled for 90a alone
  MOQEXT_CUDA_HOME         root of the toolkit; otherwise PATH, CUDA_HOME, pip's nvidia-* packages
  MOQEXT_SANITIZE=1        AddressSanitizer and UndefinedBehaviorSanitizer
  MOQEXT_RACECHECK=1       kernels whose order compute-sanitizer's racecheck can follow; slower
  MOQEXT_WERROR=1          warnings are errors, and csrc/core is compiled with -Wconversion
  MAX_JOBS                 compilers at a time; default: the number of cores
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
DEFAULT_ARCHS = "80;89;90a;100f;120f;89-virtual"
FLOORS = ("core", "cpu", "ops", "binding")
WARNINGS = ["-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Wno-cast-function-type"]
# Options of files by the end of their name. Files of csrc/cpu for one vector extension end in its name;
# nothing else may use these instructions.
AVX512 = ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vbmi"]
FILE_OPTIONS = {
    "_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "_avx512": AVX512,
    "_avx512bf16": [*AVX512, "-mavx512bf16"],
    "_amx": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}
X86_ENDS = ("_avx2", "_avx512", "_avx512bf16", "_amx")  # files for processors of one architecture
SYSTEM_LIBRARIES = ["dl", "pthread"]  # parts of libc since glibc 2.34; OpenMP is found at run time
PIP_TOOLKIT = Path("nvidia", "cu13")  # where pip's nvidia-* packages unpack, below site-packages


class Unit(NamedTuple):
    """One source file, the object it becomes, and the command that makes it."""

    source: Path
    target: Path
    command: list[str]


class Toolkit(NamedTuple):
    """A CUDA toolkit: the compiler and the directories that complete it."""

    nvcc: Path
    include: list[Path]
    library: list[Path]
    cublaslt: bool  # cublasLt.h was found in `include`


def say(message):
    """Prints one line of the build's summary."""
    print(f"moqext: {message}", flush=True)


def fail(message):
    """Ends the build with one line."""
    raise SystemExit(f"moqext: error: {message}")


def flag(name):
    """True when the environment variable `name` is set to something other than 0."""
    return os.environ.get(name, "0") not in ("", "0")


def commit():
    """Short hash of this checkout, or "unknown" when built from an archive."""
    if not (ROOT / ".git").exists():  # an archive may lie inside another repository
        return "unknown"
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


# ------------------------------------------------------------------------------------------- toolkit


def pip_toolkits():
    """Toolkit roots that pip's nvidia-* packages make, in the running Python.

    An isolated build sees another sys.path than the interpreter it will install into, so the
    directories of that interpreter are looked at as well.
    """
    places = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    roots = [Path(place, PIP_TOOLKIT) for place in dict.fromkeys(places) if place]
    return [root for root in roots if root.is_dir()]


def find_nvcc():
    """Path of nvcc, or None: MOQEXT_CUDA_HOME alone if set, else PATH, CUDA_HOME, pip's packages."""
    chosen = os.environ.get("MOQEXT_CUDA_HOME")
    if chosen:
        nvcc = Path(chosen, "bin", "nvcc")
        return nvcc if nvcc.is_file() else fail(f"MOQEXT_CUDA_HOME={chosen} has no bin/nvcc")
    on_path = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), *pip_toolkits()]
    candidates = [Path(on_path)] if on_path else []
    candidates += [Path(home, "bin", "nvcc") for home in homes if home]
    return next((path for path in candidates if path.is_file()), None)


def toolkit_root(nvcc):
    """Root of the toolkit as nvcc itself reports it: the `nvcc` on PATH may be a wrapper elsewhere."""
    try:
        done = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True, check=False)
    except OSError as error:
        fail(f"{nvcc} cannot be run: {error.strerror}")
    tops = [line.split("TOP=", 1)[1] for line in done.stderr.splitlines() if line.startswith("#$ TOP=")]
    return Path(tops[0]).resolve() if tops else nvcc.resolve().parent.parent


def complete_toolkit(nvcc):
    """Finds what belongs to `nvcc`; a missing piece is looked for in pip's packages."""
    root = toolkit_root(nvcc)
    homes = [root, *root.glob("targets/*-linux"), *pip_toolkits()]
    include = [home / "include" for home in homes if (home / "include").is_dir()]
    library = [home / name for home in homes for name in ("lib64", "lib")]
    library = [path for path in library if (path / "libcudart_static.a").is_file()]
    if not library:
        fail(f"{nvcc} was found, but no libcudart_static.a in its toolkit (moqext[cuda-build] completes it)")
    cublaslt = any((path / "cublasLt.h").is_file() for path in include)
    return Toolkit(nvcc, include, library[:1], cublaslt)


def find_cuda():
    """Returns (toolkit, None), or (None, why there is none), following MOQEXT_CUDA."""
    wish = os.environ.get("MOQEXT_CUDA") or "auto"
    if wish not in ("auto", "0", "1"):
        fail(f"MOQEXT_CUDA must be auto, 0 or 1, got {wish!r}")
    if wish == "0":
        return None, "MOQEXT_CUDA=0"
    nvcc = find_nvcc()
    if nvcc:
        return complete_toolkit(nvcc), None
    if wish == "1":
        fail("MOQEXT_CUDA=1, but nvcc was not found; set MOQEXT_CUDA_HOME or install moqext[cuda-build]")
    return None, "nvcc not found"


def archs_of(source, archs):
    """What a file is compiled for: one named for an architecture, as sm90_*.cu, for that one alone."""
    named = re.match(r"sm(\d+)_", source.name)
    if not named:
        return archs
    own = [arch for arch in archs.split(";") if arch.rstrip("af") == named[1]]
    return ";".join(own) or f"{named[1]}a"


def gencode(archs):
    """Turns "80;90a;89-virtual" into nvcc's long-form -gencode options: machine code, or PTX."""
    options = []
    for arch in filter(None, archs.split(";")):
        number = arch.removesuffix("-virtual")
        options.append(
            f"-gencode=arch=compute_{number},code={'sm' if arch == number else 'compute'}_{number}"
        )
    return options


# ----------------------------------------------------------------------------------------- compiling


def define(name, value):
    """A -D option for an integer or, as a C string literal, a string."""
    return f"-D{name}={value}" if isinstance(value, int) else f'-D{name}="{value}"'


def up_to_date(unit):
    """True when the object exists, was made by this very command, and nothing it read is newer."""
    stamp, depends = unit.target.with_suffix(".cmd"), unit.target.with_suffix(".d")
    if not (unit.target.is_file() and depends.is_file() and stamp.is_file()):
        return False
    if stamp.read_text() != shlex.join(unit.command):
        return False
    read = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    made = unit.target.stat().st_mtime
    return all(Path(path).is_file() and Path(path).stat().st_mtime < made for path in read)


def compile_unit(unit):
    """Runs one compiler; returns its exit status. Output is printed whole, so that it does not mix."""
    unit.target.parent.mkdir(parents=True, exist_ok=True)
    stamp = unit.target.with_suffix(".cmd")
    stamp.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            unit.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        fail(f"{unit.command[0]} cannot be run: {error.strerror}")
    print(shlex.join(unit.command) + "\n" + done.stdout, end="", flush=True)
    if done.returncode == 0:
        stamp.write_text(shlex.join(unit.command))
    return done.returncode


def compile_all(units):
    """Compiles the units that are out of date, the slow ones of nvcc first, until one fails."""
    stale = [unit for unit in units if not up_to_date(unit)]
    stale.sort(key=lambda unit: unit.source.suffix != ".cu")
    jobs = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        running = {pool.submit(compile_unit, unit): unit for unit in stale}
        for done in as_completed(running):
            if done.result():
                pool.shutdown(cancel_futures=True)
                unit = running[done]
                hint = " (MOQEXT_CUDA=0 builds without CUDA)" if unit.source.suffix == ".cu" else ""
                fail(f"{Path(unit.command[0]).name} failed on {unit.source}{hint}")


class BuildExt(build_ext):
    """Compiles the floors, with or without CUDA, and links the one shared library."""

    def build_extension(self, ext):
        """Replaces setuptools' one: it knows neither nvcc nor which objects are still good."""
        toolkit, why_not = find_cuda()
        if not toolkit:
            say(f"CPU-only build ({why_not})")
        archs = os.environ.get("MOQEXT_CUDA_ARCHS") or DEFAULT_ARCHS if toolkit else ""
        if toolkit and not toolkit.cublaslt:
            say("no cublasLt.h: building without cuBLASLt (moqext[cuda-build] brings it)")
        facts = {  # shown by `python -m moqext info`; each compiled into one file, so that the others keep
            "info.c": [
                define("MOQ_VERSION", VERSION),
                define("MOQ_COMMIT", commit()),
                define("MOQ_FLAGS", " ".join(ext.extra_compile_args)),
                define("MOQ_CUBLASLT", int(bool(toolkit and toolkit.cublaslt))),
            ],
            "absent.c": [define("MOQ_CUDA_WHY_NOT", why_not)],
            "absent_cublaslt.c": [define("MOQ_CUBLASLT_WHY_NOT", why_not or "no cublasLt.h")],
        }
        sources = [Path(source) for source in ext.sources] + stand_ins(toolkit)
        units = [self.c_unit(ext, path, facts.get(path.name, [])) for path in sources]
        units += [self.cuda_unit(toolkit, path, archs) for path in cuda_sources(toolkit)]
        compile_all(units)
        self.compiler.link_shared_object(
            [str(unit.target) for unit in units],
            self.get_ext_fullpath(ext.name),
            library_dirs=[str(path) for path in toolkit.library] if toolkit else [],
            libraries=["cudart_static", "rt", *SYSTEM_LIBRARIES] if toolkit else SYSTEM_LIBRARIES,
            extra_postargs=ext.extra_link_args,
        )
        built = f"CUDA ({archs}; {toolkit.nvcc})" if toolkit else "CPU only"
        say(f"built version {VERSION}, {built}")

    def c_unit(self, ext, source, macros):
        """The part of the host compiler: the command that Python itself was configured with, then ours."""
        target = self.target(source)
        floor = source.parts[1]
        include = ["-Icsrc"]
        if floor == "binding":  # the floors below cannot even see Python.h
            include += [f"-I{path}" for path in (numpy_include(), *self.compiler.include_dirs)]
            include += ["-DPy_LIMITED_API=0x030b0000"]
        isa = [
            option
            for suffix, options in FILE_OPTIONS.items()
            if source.stem.endswith(suffix)
            for option in options
        ]
        strict = ["-Wconversion"] if flag("MOQEXT_WERROR") and floor == "core" else []
        output = ["-MMD", "-MF", str(target.with_suffix(".d")), "-c", str(source), "-o", str(target)]
        command = [
            *self.compiler.compiler_so,
            *include,
            *macros,
            *ext.extra_compile_args,
            *isa,
            *strict,
            *output,
        ]
        return Unit(source, target, command)

    def cuda_unit(self, toolkit, source, archs):
        """The part of nvcc: device code for every arch, and the launchers' host code."""
        target = self.target(source)
        include = [f"-I{path}" for path in ("csrc", *toolkit.include)]
        host = ["-Xcompiler", "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics"]
        options = [
            "-O3",
            "-std=c++17",
            "-t0",
            "--compress-mode=size",
            *([define("MOQ_CUDA_ARCHS", archs)] if source.name == "device.cu" else []),
            *([define("MOQ_RACECHECK", 1)] if flag("MOQEXT_RACECHECK") else []),
        ]
        output = ["-MMD", "-MF", str(target.with_suffix(".d")), "-c", str(source), "-o", str(target)]
        archs = gencode(archs_of(source, archs))
        return Unit(source, target, [str(toolkit.nvcc), *include, *archs, *options, *host, *output])

    def target(self, source):
        """The object of `source`; its suffix keeps device.c and device.cu apart."""
        return Path(self.build_temp, source.with_suffix(source.suffix + ".o"))


def cuda_sources(toolkit):
    """The files of csrc/cuda that `toolkit` (None: there is none) can compile."""
    sources = sorted(Path("csrc/cuda").glob("*.cu")) if toolkit else []
    return [path for path in sources if toolkit.cublaslt or "cublaslt" not in path.stem]


def stand_ins(toolkit):
    """What takes the place of the others: the same functions, which fail with the reason."""
    absent = [] if toolkit else ["absent.c"]
    absent += [] if toolkit and toolkit.cublaslt else ["absent_cublaslt.c"]
    return [Path("csrc/cuda", name) for name in absent]


def numpy_include():
    """The directory of NumPy's headers, of version 2: they also serve 1.26 at run time."""
    try:
        import numpy
    except ModuleNotFoundError:
        fail("building needs NumPy >= 2.0 (pip install . brings it; --no-build-isolation does not)")
    if int(numpy.__version__.split(".")[0]) < 2:
        fail(f"building needs the headers of NumPy >= 2.0 (they run on 1.26), found {numpy.__version__}")
    return numpy.get_include()


def extension():
    """Describes `moqext._C`; the CUDA part is added when the build knows whether there is nvcc."""
    # Nobody reads the flags of floating-point exceptions; keeping them right keeps loops from vectors.
    compile_args = [
        "-std=c11",
        "-O3",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        "-fno-trapping-math",
        *WARNINGS,
    ]
    link_args = ["-Wl,--exclude-libs,ALL"]
    if flag("MOQEXT_WERROR"):
        compile_args.append("-Werror")
    if flag("MOQEXT_SANITIZE"):
        sanitize = [
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=undefined",
            "-fno-omit-frame-pointer",
        ]
        compile_args += ["-O1", "-g", *sanitize]
        link_args += sanitize
    sources = [path for floor in FLOORS for path in sorted(Path("csrc", floor).glob("*.c"))]
    if platform.machine() not in ("x86_64", "AMD64"):
        sources = [path for path in sources if not path.stem.endswith(X86_ENDS)]
    return Extension(
        "moqext._C",
        sources=[str(path) for path in sources],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        py_limited_api=True,
    )


if sysconfig.get_config_var("Py_GIL_DISABLED"):
    fail(
        "free-threaded Python is not supported: the extension uses the stable ABI (abi3), which a build "
        "without the GIL does not load; use the build with the GIL of the same version"
    )

setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
