"""Program of `make fuzz`: every target for some seconds; status 1 when one found something.

    python tests/fuzz/run.py [--seconds S] [--runs N] [TARGET ...]

The targets in C run with libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer, the others (mutate.py)
in this interpreter. Cases that reach new code are kept in build/fuzz/corpus, those that fail in
build/fuzz/findings.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there with PYTHONSAFEPATH
import mutate
import seeds
import targets

OUT = targets.ROOT / "build" / "fuzz"
REGRESSIONS = targets.HERE / "regressions"
LONGEST = {"config": 8192, "formats": 128}  # bytes of a case; else 512
MEMORY = "max_malloc_fill_size=268435456:malloc_fill_byte=255"  # what nobody wrote is NaN
LIMITS = ["-timeout=10", "-rss_limit_mb=2048", "-print_final_stats=1"]


def limits(args: argparse.Namespace, runs: str, seconds: str) -> list[str]:
    """The options that end a run."""
    return [runs.format(args.runs)] if args.runs else [seconds.format(args.seconds)]


def run_native(name: str, program: Path, args: argparse.Namespace) -> tuple[int, str]:
    """Status and output of one libFuzzer target. Leaks are looked for, in a process of its own runtime."""
    corpus = OUT / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    known = [path for path in (OUT / "seeds" / name, REGRESSIONS / name) if path.is_dir()]
    options = [f"-max_len={LONGEST.get(name, 512)}", f"-artifact_prefix={OUT / 'findings' / name}-", *LIMITS]
    options += limits(args, "-runs={}", "-max_total_time={}")
    clean = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    clean["ASAN_OPTIONS"] = MEMORY
    done = subprocess.run(
        [program, *options, corpus, *known], env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.returncode, done.stdout.decode(errors="replace")


def run_python(name: str, args: argparse.Namespace) -> tuple[int, str]:
    """Status and output of one target of mutate.py."""
    command = [sys.executable, str(targets.HERE / "mutate.py"), name]
    command += limits(args, "--runs={}", "--seconds={}")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout.decode(errors="replace")


def executions(output: str) -> int:
    found = re.search(r"number_of_executed_units: (\d+)|: (\d+) cases in", output)
    return int(found[1] or found[2]) if found else 0


def main() -> int:
    python_targets = [f"python-{name}" for name in mutate.TARGETS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=int, default=20, help="for each target")
    parser.add_argument("--runs", type=int, help="executions of each target, instead of a time")
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=", ".join([*targets.TARGETS, *python_targets])
    )
    args = parser.parse_args()
    chosen = args.targets or [*targets.TARGETS, *python_targets]
    if unknown := set(chosen) - {*targets.TARGETS, *python_targets}:
        parser.error(f"no target named {', '.join(sorted(unknown))}")
    programs: dict[str, Path] = {}
    if set(chosen) & set(targets.TARGETS):
        try:
            programs = targets.build(OUT / "bin", targets.find_fuzzer(), fuzzer=True, sanitize=True)
        except targets.BuildError as error:
            sys.exit(str(error))
        seeds.write(OUT / "seeds")
    (OUT / "findings").mkdir(parents=True, exist_ok=True)
    worst = 0
    for name in chosen:
        start = time.monotonic()
        if name in programs:
            status, output = run_native(name, programs[name], args)
        else:
            status, output = run_python(name.removeprefix("python-"), args)
        seconds = time.monotonic() - start
        print(f"{name:18} {executions(output):>10,} executions in {seconds:6.0f} s", flush=True)
        if status:
            print(f"{output[-6000:]}\n{name}: status {status}; the case is above or in {OUT / 'findings'}")
        worst = worst or int(status != 0)
    return worst


if __name__ == "__main__":
    sys.exit(main())
