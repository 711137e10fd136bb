"""Builds the fuzz targets: with clang and libFuzzer, or with any C compiler as programs that replay files.

python tests/fuzz/targets.py --check      is there a compiler with libFuzzer?
"""

import argparse
import ast
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TARGETS = tuple(sorted(path.stem.removeprefix("fuzz_") for path in HERE.glob("fuzz_*.c")))
FLOORS = ("core", "cpu", "ops")
FLAGS = ["-std=gnu11", "-g", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-ffp-contract=off"]
FLAGS += [f'-D{name}="a fuzz target"' for name in ("MOQ_CUDA_WHY_NOT", "MOQ_CUBLASLT_WHY_NOT")]
UNTRACED = ("cpu", "fuzz")  # folders of loops over numbers: libFuzzer learns nothing from their comparisons
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


class BuildError(Exception):
    """A compiler failed, or there is none; the text says which and why."""


def run(command: list[str]) -> None:
    """Runs one compiler, whose own variables are the only ones it sees of the sanitizers'."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(" ".join(command) + "\n" + done.stdout + done.stderr)


def works(compiler: str, flags: list[str]) -> bool:
    """Whether the compiler can make a program with these flags: their runtime may not be installed."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "probe.c")
        source.write_text(
            "#include <stddef.h>\n"
            "int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);\n"
            "int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size) {\n"
            "    return data && size > 9;\n}\n"
            + ("" if "-fsanitize=fuzzer" in flags else "int main(void) {\n    return 0;\n}\n")
        )
        try:
            run([compiler, *flags, str(source), "-o", str(Path(scratch, "probe"))])
        except (BuildError, OSError):
            return False
    return True


def find_fuzzer() -> str:
    """A clang with libFuzzer and the sanitizers.

    Raises:
        BuildError: there is none; says what to install.
    """
    names = [os.environ.get("CLANG", ""), "clang", *(f"clang-{version}" for version in range(25, 10, -1))]
    found = [name for name in names if name and shutil.which(name)]
    for name in found:
        if works(name, ["-fsanitize=fuzzer", *SANITIZE]):
            return name
    what = f"{found[0]} has no libFuzzer runtime" if found else "clang was not found"
    raise BuildError(
        f"make fuzz: {what}. Install clang and its compiler-rt (Debian, Ubuntu: apt-get install clang and "
        "libclang-rt-N-dev for its version N; Fedora: clang compiler-rt), or name one with CLANG=..."
    )


def file_options() -> dict[str, list[str]]:
    """Options of setup.py for files of some names, by the end of their stem."""
    found: dict[str, dict[str, list[str]]] = {}
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("AVX512", "FILE_OPTIONS"):
            exec(ast.unparse(node), found)
    return found["FILE_OPTIONS"]


def sanitized_objects(compiler: str) -> dict[Path, Path]:
    """Objects of `make sanitize` by source: those of this compiler that are later than every file of csrc."""
    newest = max(path.stat().st_mtime for path in (ROOT / "csrc").rglob("*.[ch]"))
    found: dict[Path, Path] = {}
    for made in (ROOT / "build").glob("temp*/c-sanitize/csrc/**/*.o"):
        stamp = made.with_suffix(".cmd")
        if made.stat().st_mtime <= newest or not stamp.is_file():
            continue
        by = shutil.which(shlex.split(stamp.read_text())[0])
        if by and os.path.samefile(by, shutil.which(compiler) or compiler):
            source = made.relative_to(next(up for up in made.parents if up.name == "c-sanitize"))
            found[ROOT / source.with_suffix("")] = made
    return found


def build(out: Path, compiler: str, *, fuzzer: bool, sanitize: bool) -> dict[str, Path]:
    """Compiles every target into `out` and returns the programs by name.

    Programs that have sanitizers without libFuzzer take the objects of `make sanitize` that are there.

    Raises:
        BuildError: a file does not compile; the text is the compiler's.
    """
    flags = [*FLAGS, "-O2" if fuzzer else "-O0", *(SANITIZE if sanitize else [])]
    instrument = ["-fsanitize=fuzzer-no-link"] if fuzzer else []
    sources = [path for floor in FLOORS for path in sorted((ROOT / "csrc" / floor).glob("*.c"))]
    sources += sorted((ROOT / "csrc" / "cuda").rglob("*.c"))
    sources += [HERE / "fuzz.c", HERE / "text.c", *([] if fuzzer else [HERE / "replay.c"])]
    targets = {name: HERE / f"fuzz_{name}.c" for name in TARGETS}
    out.mkdir(parents=True, exist_ok=True)
    files = [*sources, *targets.values()]
    objects = {path: out / f"{'_'.join(path.relative_to(ROOT).with_suffix('.o').parts)}" for path in files}
    kept = sanitized_objects(compiler) if sanitize and not fuzzer else {}
    for path in kept.keys() & objects.keys():
        objects[path].symlink_to(kept[path])
    include = [f"-I{ROOT / 'csrc'}", f"-I{HERE}"]
    options = file_options()

    def compile_one(source: Path) -> None:
        own = next((own for end, own in options.items() if source.stem.endswith(end)), [])
        traced = ["-fno-sanitize-coverage=trace-cmp"] if fuzzer and source.parent.name in UNTRACED else []
        output = ["-c", str(source), "-o", str(objects[source])]
        run([compiler, *flags, *own, *instrument, *traced, *include, *output])

    def link(name: str) -> Path:
        program = out / name
        parts = [str(objects[path]) for path in [*sources, targets[name]]]
        run(
            [
                compiler,
                *flags,
                *(["-fsanitize=fuzzer"] if fuzzer else []),
                *parts,
                "-lm",
                "-ldl",
                "-pthread",
                "-o",
                str(program),
            ]
        )
        return program

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_one, [path for path in objects if path not in kept]))
        return dict(zip(targets, pool.map(link, targets), strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", required=True)
    parser.parse_args()
    try:
        find_fuzzer()
    except BuildError as error:
        sys.exit(str(error))
