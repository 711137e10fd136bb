"""Builds the extension `moqext._C`: C with the host compiler, CUDA C with nvcc where there is one.

Every source is compiled once to an object below the build directory, several at a time; an object is
kept while its command, its source and the headers it includes have not changed. Objects of one flavour
(warnings are errors, sanitizers, each set of architectures, ...) lie in a directory of their own, so that
flavours do not evict each other's. The host linker makes the one shared library; nvcc never links.

Environment:
  MOQEXT_CUDA=auto|0|1     auto (default) compiles csrc/cuda when nvcc is found, 1 demands it: where there is
                           no GPU for "all" architectures
  MOQEXT_CUDA_ARCHS        "native" (default): the GPUs of this machine, and no CUDA where there is none;
                           "all": "80;89;90a;100f;120f;89-virtual"; or a list of that form. Files of a
                           folder sm90 are compiled for 90a alone. "check": PTX of one chip, compiled
                           fast (-Ofc=max), whose instructions ptxas checks; no GPU runs it
  MOQEXT_CUDA_HOME         root of the toolkit; otherwise PATH, CUDA_HOME, pip's nvidia-* packages
  MOQEXT_SANITIZE=1        AddressSanitizer and UndefinedBehaviorSanitizer, and checks of invariants
  MOQEXT_RACECHECK=1       kernels whose order compute-sanitizer's racecheck can follow; slower
  MOQEXT_WERROR=1          warnings are errors, and csrc/core is compiled with -Wconversion
  MOQEXT_VERBOSE=1         shows each file with its command and its seconds, instead of a bar
  MAX_JOBS                 compilers at a time; default: the number of cores
"""

import ctypes
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    import tomllib
except ModuleNotFoundError:
    raise SystemExit(
        f"moqext: error: moqext needs Python >= 3.11, this is {platform.python_version()}"
    ) from None

ROOT = Path(__file__).resolve().parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PYPROJECT["project"]["version"]
ALL_ARCHS = "80;89;90a;100f;120f;89-virtual"
CHECK = "check"  # stands for architectures, also in what a build tells: no GPU finds code of its own there
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
# One header of each package that a toolkit is made of: where all are there, pip's packages are not looked at.
LINES_EVERY = 10.0  # seconds between two lines on the progress of a build, where no terminal shows a bar
BAR = 30  # columns of the bar
TOOLKIT_HEADERS = ("cuda_runtime.h", "crt/host_config.h", "cccl/nv/target")
PIP_TOOLKIT = Path("nvidia", "cu13")  # where pip's nvidia-* packages unpack, below site-packages


class Unit(NamedTuple):
    """One source file, the object it becomes, the command that makes it, and that command as it is kept."""

    source: Path
    target: Path
    command: list[str]
    kept: str  # a command that gives another object is another text; where headers lie is not in it


class Toolkit(NamedTuple):
    """A CUDA toolkit: the compiler and the directories that complete it."""

    nvcc: Path
    include: list[Path]
    library: list[Path]


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


def check_setuptools():
    """Ends the build with one line where setuptools is older than what pyproject.toml asks for."""
    needed = next(entry for entry in PYPROJECT["build-system"]["requires"] if entry.startswith("setuptools"))
    oldest, found = (int(re.search(r"\d+", text)[0]) for text in (needed, setuptools.__version__))
    if found < oldest:
        fail(
            f"building needs {needed}, found {setuptools.__version__}: pip install '{needed}' 'numpy>=2.0' "
            "(pip install . brings them by itself)"
        )


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
    homes = [root, *root.glob("targets/*-linux")]
    include = [home / "include" for home in homes if (home / "include").is_dir()]
    if not all(any((path / header).is_file() for path in include) for header in TOOLKIT_HEADERS):
        include += [home / "include" for home in pip_toolkits()]
    library = [home / name for home in [*homes, *pip_toolkits()] for name in ("lib64", "lib")]
    library = [path for path in library if (path / "libcudart_static.a").is_file()]
    if not library:
        fail(f"{nvcc}: no libcudart_static.a in its toolkit; pip install '.[cuda-build]' completes it")
    return Toolkit(nvcc, include, library[:1])


def find_cuda():
    """Returns (toolkit, its architectures, None), or (None, "", why there is none), following MOQEXT_CUDA."""
    wish = os.environ.get("MOQEXT_CUDA") or "auto"
    if wish not in ("auto", "0", "1"):
        fail(f"MOQEXT_CUDA must be auto, 0 or 1, got {wish!r}")
    if wish == "0":
        return None, "", "MOQEXT_CUDA=0"
    nvcc = find_nvcc()
    if not nvcc:
        if wish == "1":
            fail("MOQEXT_CUDA=1, but nvcc was not found; set MOQEXT_CUDA_HOME or pip install '.[cuda-build]'")
        return None, "", "nvcc not found"
    archs, why_not = find_archs(demanded=wish == "1")
    return (None, "", why_not) if why_not else (complete_toolkit(nvcc), archs, None)


def find_archs(demanded):
    """Returns (architectures, None), or ("", why there are none), following MOQEXT_CUDA_ARCHS.

    An image is built where there is no GPU: CUDA that is `demanded`, with no word about architectures, is
    compiled for all of them there.
    """
    wish = os.environ.get("MOQEXT_CUDA_ARCHS")
    if wish == "all":
        return ALL_ARCHS, None
    if wish and wish != "native":
        return wish, None
    archs, names = native_archs(find_gpus())
    if archs:
        say(f"building for this machine alone: {names} ({archs}); MOQEXT_CUDA_ARCHS=all builds for every GPU")
        return archs, None
    why_not = "there was no GPU that it runs on; MOQEXT_CUDA_ARCHS=all builds for every GPU"
    if not demanded:
        return "", why_not
    if wish:
        fail(f"MOQEXT_CUDA=1 and MOQEXT_CUDA_ARCHS=native, but {why_not}")
    say("no GPU here: building for every GPU, half an hour and more on two cores")
    return ALL_ARCHS, None


def find_gpus():
    """(name, major, minor) of every GPU that the driver shows; none where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device, major, minor = (ctypes.c_int() for _ in range(4))
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    gpus = []
    for index in range(count.value):
        name = ctypes.create_string_buffer(256)
        calls = [
            driver.cuDeviceGet(ctypes.byref(device), index),
            driver.cuDeviceGetName(name, len(name), device),
            driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device),  # COMPUTE_CAPABILITY_MAJOR
            driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device),  # COMPUTE_CAPABILITY_MINOR
        ]
        if not any(calls):
            gpus.append((name.value.decode(errors="replace"), major.value, minor.value))
    return gpus


def arch_of_gpu(major, minor):
    """The one of the default architectures that a GPU runs, the closest; None for one that is too old.

    Code for 8.0 runs on 8.6, family code (100f) on later chips of its major version, code with an "a" on
    that very chip; a driver compiles PTX for every later chip.
    """
    best = None
    for arch in ALL_ARCHS.split(";"):
        number, kind = re.fullmatch(r"(\d+)(\D*)", arch).groups()
        own = (int(number[:-1]), int(number[-1]))
        runs = own == (major, minor) if kind == "a" else own[0] == major and own[1] <= minor
        if kind == "-virtual":
            runs = best is None and own <= (major, minor)
        best = arch if runs else best
    return best


def native_archs(gpus):
    """What to compile for these GPUs, as "90a", and their names; "" where moqext runs on none."""
    chosen = {name: arch_of_gpu(major, minor) for name, major, minor in gpus}
    archs = [arch for arch in ALL_ARCHS.split(";") if arch in chosen.values()]
    return ";".join(archs), ", ".join(name for name, arch in chosen.items() if arch)


def archs_of(source, archs):
    """Architectures of a file: the build's, or below a folder named for one, as sm90, that one alone."""
    named = re.search(r"/sm(\d+)/", source.as_posix())
    if archs == CHECK:
        return f"{named[1]}a-virtual" if named else "89-virtual"
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
    if stamp.read_text() != unit.kept:
        return False
    read = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    made = unit.target.stat().st_mtime
    return all(Path(path).is_file() and Path(path).stat().st_mtime < made for path in read)


def compile_unit(unit):
    """Runs one compiler; returns its exit status, its output and the seconds it took."""
    unit.target.parent.mkdir(parents=True, exist_ok=True)
    stamp = unit.target.with_suffix(".cmd")
    stamp.unlink(missing_ok=True)
    start = time.monotonic()
    try:
        done = subprocess.run(
            unit.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        fail(f"{unit.command[0]} cannot be run: {error.strerror}")
    if done.returncode == 0:
        stamp.write_text(unit.kept)
    if done.returncode or flag("MOQEXT_VERBOSE"):
        return done.returncode, shlex.join(unit.command) + "\n" + done.stdout, time.monotonic() - start
    return 0, done.stdout, time.monotonic() - start


class Progress:
    """Tells how far the compilers are, and all that one writes.

    A terminal has a bar, else there is a line every LINES_EVERY seconds; MOQEXT_VERBOSE=1 has a line a file.
    """

    def __init__(self, total):
        self.total, self.verbose, self.begin = total, flag("MOQEXT_VERBOSE"), time.monotonic()
        dumb = os.environ.get("TERM", "dumb") in ("", "dumb")
        self.terminal = sys.stdout.isatty() and not dumb and not self.verbose
        self.next = self.begin + LINES_EVERY
        self.draw(0, "")

    def __call__(self, count, unit, seconds, output):
        """One more unit is done, the `count`-th."""
        if self.verbose:
            width = len(str(self.total))
            print(
                f"[{count:{width}}/{self.total}] {unit.source} {seconds:.1f} s\n{output}", end="", flush=True
            )
            return
        if output:
            self.wipe()
            print(f"{unit.source}:\n{output}", end="", flush=True)
        self.draw(count, unit.source)
        if not self.terminal and time.monotonic() >= self.next:
            self.next = time.monotonic() + LINES_EVERY
            say(f"compiled {count} of {self.total} files, {time.monotonic() - self.begin:.0f} s")

    def draw(self, count, source):
        """Rewrites the line of the bar, on a terminal."""
        if self.terminal and self.total:
            filled = BAR * count // self.total
            line = f"moqext: [{'#' * filled}{'.' * (BAR - filled)}] {count}/{self.total} {source}"
            print(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)

    def wipe(self):
        """Clears the line of the bar, for what is to be printed."""
        if self.terminal and self.total:
            print("\r\x1b[K", end="", flush=True)

    def end(self):
        """Says how many files there were, and how long they took."""
        self.wipe()
        if self.total:
            say(f"compiled {self.total} files in {time.monotonic() - self.begin:.0f} s")


def compile_all(units):
    """Compiles the units that are out of date, the slow ones of nvcc first, until one fails."""
    stale = [unit for unit in units if not up_to_date(unit)]
    stale.sort(key=lambda unit: unit.source.suffix != ".cu")
    progress = Progress(len(stale))
    jobs = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        running = {pool.submit(compile_unit, unit): unit for unit in stale}
        for count, done in enumerate(as_completed(running), 1):
            unit, (status, output, seconds) = running[done], done.result()
            progress(count, unit, seconds, output)
            if status:
                pool.shutdown(cancel_futures=True)
                progress.wipe()
                hint = " (MOQEXT_CUDA=0 builds without CUDA)" if unit.source.suffix == ".cu" else ""
                fail(f"{Path(unit.command[0]).name} failed on {unit.source}{hint}")
    progress.end()


class BuildExt(build_ext):
    """Compiles the floors, with or without CUDA, and links the one shared library."""

    def build_extension(self, ext):
        """Replaces setuptools' one: it knows neither nvcc nor which objects are still good."""
        toolkit, archs, why_not = find_cuda()
        if not toolkit:
            say(f"CPU-only build ({why_not})")
        facts = {  # shown by `python -m moqext info`; each compiled into one file, so that the others keep
            "info.c": [
                define("MOQ_VERSION", VERSION),
                define("MOQ_COMMIT", commit()),
                define("MOQ_FLAGS", " ".join(ext.extra_compile_args)),
            ],
            "absent.c": [define("MOQ_CUDA_WHY_NOT", why_not)],
        }
        c_sources, cuda_sources = sources_of_cuda(toolkit)
        sources = [Path(source) for source in ext.sources] + c_sources
        units = [self.c_unit(ext, path, facts.get(path.name, [])) for path in sources]
        units += [self.cuda_unit(toolkit, path, archs) for path in cuda_sources]
        compile_all(units)
        self.compiler.force = True  # the library that is there may be of another flavour, and later
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
        flavour = ["c", *(name for name in ("werror", "sanitize") if flag(f"MOQEXT_{name.upper()}"))]
        target = self.target("-".join(flavour), source)
        floor = source.parts[1]
        include, numpy = ["-Icsrc"], None
        if floor == "binding":  # the floors below cannot even see Python.h
            numpy, numpy_version = numpy_headers()
            include += [f"-I{path}" for path in self.python_include()]
            include += ["-isystem", numpy, "-DPy_LIMITED_API=0x030b0000"]
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
        kept = shlex.join(command)
        if numpy:  # every isolated build has its own copy of one version; compilers list no system headers
            kept = kept.replace(numpy, f"numpy-{numpy_version}")
        return Unit(source, target, command, kept)

    def python_include(self):
        """The directories of Python.h, without the environment's own, which is empty."""
        own = Path(sys.exec_prefix, "include") if sys.exec_prefix != sys.base_exec_prefix else None
        return [path for path in self.compiler.include_dirs if Path(path) != own]

    def cuda_unit(self, toolkit, source, archs):
        """The part of nvcc: device code for every arch, and the launchers' host code."""
        archs_here = archs_of(source, archs)
        checks = [name for name in ("racecheck", "sanitize") if flag(f"MOQEXT_{name.upper()}")]
        check = archs == CHECK
        flavour = ["cuda", CHECK if check else archs_here.replace(";", "_"), *checks]
        target = self.target("-".join(flavour), source)
        include = [f"-I{path}" for path in ("csrc", *toolkit.include)]
        host = ["-Xcompiler", "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics"]
        options = [
            "-O3",
            "-std=c++17",
            "-t0",
            *(["-Ofc=max", "--compress-mode=speed"] if check else ["--compress-mode=size"]),
            *([define("MOQ_CUDA_ARCHS", archs)] if source.name == "devices.cu" else []),
            *([define("MOQ_RACECHECK", 1)] if flag("MOQEXT_RACECHECK") else []),
            *(["-DMOQ_CHECKED"] if flag("MOQEXT_SANITIZE") else []),
        ]
        output = ["-MMD", "-MF", str(target.with_suffix(".d")), "-c", str(source), "-o", str(target)]
        command = [str(toolkit.nvcc), *include, *gencode(archs_here), *options, *host, *output]
        return Unit(source, target, command, shlex.join(command))

    def target(self, flavour, source):
        """The object of `source` for a flavour; its suffix keeps device.c and devices.cu apart."""
        return Path(self.build_temp, flavour, source.with_suffix(source.suffix + ".o"))


def sources_of_cuda(toolkit):
    """The files of csrc/cuda and its rooms: (those of the C compiler, those of nvcc).

    C files are part of every build, but for absent*.c: stand-ins for the functions of the .cu files, which
    fail with the reason why there is no `toolkit`.
    """
    c_files = sorted(Path("csrc/cuda").rglob("*.c"))
    if not toolkit:
        return c_files, []
    return [path for path in c_files if not path.stem.startswith("absent")], sorted(
        Path("csrc/cuda").rglob("*.cu")
    )


def numpy_headers():
    """The directory of NumPy's headers and their version: of 2, which also serve 1.26 at run time."""
    try:
        import numpy
    except ModuleNotFoundError:
        fail("building needs NumPy >= 2.0 (pip install . brings it; --no-build-isolation does not)")
    if int(numpy.__version__.split(".")[0]) < 2:
        fail(f"building needs the headers of NumPy >= 2.0 (they run on 1.26), found {numpy.__version__}")
    return numpy.get_include(), numpy.__version__


def extension():
    """Describes `moqext._C`; the CUDA part is added when the build knows whether there is nvcc."""
    # Nobody reads the flags of floating-point exceptions or what sqrt writes to errno; keeping them right
    # keeps loops from vectors.
    compile_args = [
        "-std=c11",
        "-O3",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        "-fno-trapping-math",
        "-fno-math-errno",
        *WARNINGS,
    ]
    link_args = ["-Wl,--version-script=csrc/exports.map"]
    if flag("MOQEXT_WERROR"):
        compile_args.append("-Werror")
    if flag("MOQEXT_SANITIZE"):
        sanitize = [
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=undefined",
            "-fno-omit-frame-pointer",
        ]
        compile_args += ["-O1", "-g1", "-DMOQ_CHECKED", *sanitize]  # reports name lines, no variables
        link_args += sanitize
    sources = [path for floor in FLOORS for path in sorted(Path("csrc", floor).rglob("*.c"))]
    if not sysconfig.get_platform().endswith("-x86_64"):  # what is built for, which may be another machine
        sources = [path for path in sources if not path.stem.endswith(X86_ENDS)]
    return Extension(
        "moqext._C",
        sources=[str(path) for path in sources],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        py_limited_api=True,
    )


check_setuptools()
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
