"""Builds the extension `moqext._C`: C with the host compiler, CUDA C with nvcc where there is one.

Environment:
  MOQEXT_CUDA=auto|0|1     auto (default) compiles csrc/cuda when nvcc is found, 1 demands it
  MOQEXT_CUDA_ARCHS        default "80;89;90a;100f;120f"
  MOQEXT_CUDA_HOME         root of the toolkit, looked at before PATH and pip's nvidia-* packages
  MOQEXT_SANITIZE=1        AddressSanitizer and UndefinedBehaviorSanitizer
  MOQEXT_WERROR=1          warnings are errors, and csrc/core is compiled with -Wconversion
"""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    import tomllib
except ModuleNotFoundError as error:  # Python < 3.11 never gets past requires-python
    raise SystemExit("moqext needs Python >= 3.11") from error

ROOT = Path(__file__).resolve().parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
DEFAULT_ARCHS = "80;89;90a;100f;120f"
FLOORS = ("core", "cpu", "ops", "binding")
WARNINGS = ["-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Wno-cast-function-type"]


def flag(name):
    """True when the environment variable `name` is set to something other than 0."""
    return os.environ.get(name, "0") not in ("", "0")


def commit():
    """Short hash of the checkout, or "unknown" when built from an archive."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def find_nvcc():
    """Path of nvcc: MOQEXT_CUDA_HOME, PATH, CUDA_HOME, then the packages nvidia-cuda-nvcc installs."""
    roots = [os.environ.get("MOQEXT_CUDA_HOME"), os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    roots.append(str(Path(sysconfig.get_path("purelib"), "nvidia", "cu13")))
    candidates = [Path(root, "bin", "nvcc") for root in roots if root]
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.insert(1 if roots[0] else 0, Path(on_path))
    return next((path.resolve() for path in candidates if path.is_file()), None)


def toolkit_root(nvcc):
    """Root of the toolkit as nvcc itself sees it: the `nvcc` on PATH may be a wrapper elsewhere."""
    done = subprocess.run([str(nvcc), "--dryrun", "-c", "x.cu"], capture_output=True, text=True, check=False)
    tops = [line.split("TOP=", 1)[1] for line in done.stderr.splitlines() if line.startswith("#$ TOP=")]
    return Path(tops[0]).resolve() if tops else nvcc.parent.parent


def toolkit_dirs(nvcc):
    """Include and library directories that complete the toolkit `nvcc` belongs to."""
    homes = [toolkit_root(nvcc), Path(sysconfig.get_path("purelib"), "nvidia", "cu13")]
    homes += list(homes[0].glob("targets/x86_64-linux"))
    include = [str(home / "include") for home in homes if (home / "include").is_dir()]
    library = [
        str(home / name)
        for home in homes
        for name in ("lib64", "lib")
        if (home / name / "libcudart_static.a").is_file()
    ]
    return include, library


def cuda_choice():
    """Returns nvcc's path or None, following MOQEXT_CUDA, and says in one line what was chosen."""
    wish = os.environ.get("MOQEXT_CUDA", "auto")
    if wish not in ("auto", "0", "1"):
        raise SystemExit(f"MOQEXT_CUDA must be auto, 0 or 1, got {wish!r}")
    if wish == "0":
        print("moqext: CPU-only build (MOQEXT_CUDA=0)")
        return None
    nvcc = find_nvcc()
    if nvcc is None:
        if wish == "1":
            raise SystemExit(
                "moqext: MOQEXT_CUDA=1, but nvcc was not found; set MOQEXT_CUDA_HOME or install moqext[cuda-build]"
            )
        print("moqext: CPU-only build (nvcc not found)")
    return nvcc


def gencode(archs):
    """Turns "80;90a;120f" into nvcc's long-form -gencode options."""
    return [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs.split(";") if arch]


class BuildExt(build_ext):
    """Compiles .cu files with nvcc to objects; the host linker makes the one shared library."""

    def build_extension(self, ext):
        nvcc = cuda_choice()
        archs = os.environ.get("MOQEXT_CUDA_ARCHS", DEFAULT_ARCHS) if nvcc else ""
        if nvcc:
            self.add_cuda(ext, nvcc, archs)
        else:
            ext.sources.append("csrc/cuda/absent.c")
        ext.define_macros += [
            ("MOQ_CUDA_ARCHS", f'"{archs}"'),
            ("MOQ_FLAGS", '"{}"'.format(" ".join(ext.extra_compile_args))),
        ]
        self.compile_core_strictly()
        super().build_extension(ext)
        kind = f"CUDA ({archs}, {nvcc})" if nvcc else "CPU only"
        print(f"moqext: built version {VERSION}, {kind}")

    def add_cuda(self, ext, nvcc, archs):
        """Compiles csrc/cuda/*.cu and links them with the static runtime."""
        include, library = toolkit_dirs(nvcc)
        if not library:
            raise SystemExit(f"moqext: {nvcc} was found, but not libcudart_static.a beside it")
        for source in sorted(Path("csrc/cuda").glob("*.cu")):
            target = Path(self.build_temp, source.with_suffix(".o"))
            target.parent.mkdir(parents=True, exist_ok=True)
            command = [str(nvcc), "-c", str(source), "-o", str(target), "-O3", "-std=c++17", "-t0", "-Icsrc"]
            command += [f"-I{path}" for path in include] + gencode(archs)
            command += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti", "--compress-mode=size"]
            print(" ".join(command))
            if subprocess.run(command, check=False).returncode:
                raise SystemExit(f"moqext: nvcc failed on {source} (MOQEXT_CUDA=0 builds without CUDA)")
            ext.extra_objects.append(str(target))
        ext.library_dirs += library
        ext.libraries += ["cudart_static", "dl", "rt", "pthread"]

    def compile_core_strictly(self):
        """With MOQEXT_WERROR, adds -Wconversion to the files of csrc/core, where nothing else is included."""
        compile_one = self.compiler._compile

        def compile_with_floor(obj, src, ext, cc_args, extra_postargs, pp_opts):
            extra = ["-Wconversion"] if flag("MOQEXT_WERROR") and "csrc/core/" in src else []
            compile_one(obj, src, ext, cc_args, extra_postargs + extra, pp_opts)

        self.compiler._compile = compile_with_floor


def extension():
    """Describes `moqext._C`; the CUDA part is added when the build knows whether there is nvcc."""
    import numpy

    if int(numpy.__version__.split(".")[0]) < 2:
        raise SystemExit(f"moqext is built against NumPy >= 2.0 headers (and runs on 1.26); found {numpy.__version__}")
    compile_args = ["-std=c11", "-O3", "-fvisibility=hidden", "-ffp-contract=off", *WARNINGS]
    link_args = ["-Wl,--exclude-libs,ALL"]
    if flag("MOQEXT_WERROR"):
        compile_args.append("-Werror")
    if flag("MOQEXT_SANITIZE"):
        sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
        compile_args += ["-O1", "-g", *sanitize]
        link_args += sanitize
    sources = [str(path) for floor in FLOORS for path in sorted(Path("csrc", floor).glob("*.c"))]
    headers = [str(path) for path in sorted(Path("csrc").rglob("*.h"))]
    return Extension(
        "moqext._C",
        sources=sources,
        depends=headers,
        include_dirs=["csrc", numpy.get_include()],
        define_macros=[
            ("Py_LIMITED_API", "0x030b0000"),
            ("MOQ_VERSION", f'"{VERSION}"'),
            ("MOQ_COMMIT", f'"{commit()}"'),
            ("MOQ_COMPILER", "__VERSION__"),
        ],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        py_limited_api=True,
    )


setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
