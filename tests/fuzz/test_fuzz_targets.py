"""The fuzz targets in C, as programs with sanitizers of their own, over genuine cases, changes of them, and
those once found."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import seeds
import targets as builder

COMPILER = next((name for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if shutil.which(name)), "")
REGRESSIONS = Path(__file__).parent / "regressions"
CASES = 24  # of each target; all of them take half a minute

needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C compiler")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    sanitize = builder.works(COMPILER, builder.SANITIZE)
    return builder.build(tmp_path_factory.mktemp("targets"), COMPILER, fuzzer=False, sanitize=sanitize)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return seeds.write(tmp_path_factory.mktemp("cases"))


def changed(case: bytes, generator: random.Random) -> bytes:
    """The case with a few bytes replaced, removed or inserted."""
    content = bytearray(case)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(content) + 1)
        content[at : at + generator.randint(0, 2)] = generator.randbytes(generator.randint(0, 3))
    return bytes(content)


def execute(program, files, **environment):
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run([program, *files], env={**clean, **environment}, capture_output=True, text=True)


def replay(program, files, **environment):
    done = execute(program, files, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) == len(files) + 1


def test_every_target_has_seeds():
    assert set(seeds.TARGETS) == set(builder.TARGETS)
    assert {path.name for path in REGRESSIONS.iterdir()} <= set(builder.TARGETS)


@needs_compiler
@pytest.mark.parametrize("target", builder.TARGETS)
def test_genuine_cases_and_changes_of_them(programs, cases, target, tmp_path, rng):
    chosen = cases[target][:: max(len(cases[target]) // CASES, 1)]
    files = [*chosen]
    generator = random.Random(int(rng.integers(2**32)))
    for number, path in enumerate(chosen):
        files.append(tmp_path / f"{number}")
        files[-1].write_bytes(changed(path.read_bytes(), generator))
    replay(programs[target], files)
    if target in ("formats", "quantize", "linear"):
        replay(programs[target], files, MOQEXT_ISA="portable")


@needs_compiler
@pytest.mark.parametrize(
    "path", sorted(REGRESSIONS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_cases_once_found(programs, path):
    replay(programs[path.parent.name], [path])


@needs_compiler
def test_a_broken_promise_ends_the_process(tmp_path, programs):
    """The harness sees what goes wrong: a target that checks nothing would pass everything."""
    source = tmp_path / "broken.c"
    source.write_text(
        '#include "fuzz.h"\n'
        "int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {\n"
        '    FUZZ_CHECK(size < 2, "%zu bytes, the first %d", size, data[0]);\n    return 0;\n}\n'
    )
    objects = next(iter(programs.values())).parent
    shared = [path for path in objects.glob("*.o") if not path.stem.startswith("tests_fuzz_fuzz_")]
    flags = [*builder.FLAGS, *(builder.SANITIZE if builder.works(COMPILER, builder.SANITIZE) else [])]
    include = [f"-I{builder.ROOT / 'csrc'}", f"-I{builder.HERE}"]
    builder.run(
        [COMPILER, *flags, *include, str(source), *map(str, shared), "-lm", "-o", str(tmp_path / "x")]
    )
    (tmp_path / "case").write_bytes(b"\x2a\x00")
    done = execute(tmp_path / "x", [tmp_path / "case"])
    assert done.returncode < 0
    assert "2 bytes, the first 42" in done.stderr
