"""GPU tests under a tool of compute-sanitizer, in processes that each have a tool of their own.

One tool over all processes instruments the kernels of one after the other, which takes most of the time; so
each share of the tests is a run by itself. Prints how many tests of a share passed, and all that was said of
one that is not clean; then the tests that the time was too short for, and those that failed.

    python tests/sanitize_cuda.py --tool racecheck --jobs 10 tests/cuda/test_fp8_prefill.py
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

OPTIONS = {
    "memcheck": ["--report-api-errors", "no"],
    "racecheck": ["--kernel-name-exclude", "kns=nvjet"],
    "synccheck": ["--num-cuda-barriers", "65536"],
}
"""A call of CUDA's fails because a test asks for a terabyte; racecheck finds hazards in kernels of NVIDIA's
library too; of some kernels synccheck would not count all barriers, and then makes launches fail. With so
many it takes 10 GB of the device and more for each process, and says of launches that it did not track them
where that is not to be had: 6 processes at a time were not too many for 141 GB, 10 were."""

FINDING = re.compile(r"^=========\s+(?!COMPUTE-SANITIZER|\w+ SUMMARY: 0 )\S.*", re.MULTILINE)
OUTCOME = re.compile(r"(tests/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


@dataclass
class Share:
    """Tests that run in one process, and what came of them."""

    tests: list[str]
    outcome: dict[str, str] = field(default_factory=dict)
    found: int | None = None  # by the tool; None where it did not come to its end
    status: int = 0
    text: str = ""
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return self.status == 0 and self.found == 0

    @property
    def stopped(self) -> bool:
        return self.status < 0 or self.found is None


def collect(options: list[str]) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options]
    result = subprocess.run(command, capture_output=True, text=True)
    tests = [line for line in result.stdout.splitlines() if "::" in line]
    if result.returncode != 0 or not tests:
        sys.exit(result.stdout + result.stderr)
    return tests


def run(share: Share, tool: str, device: str, deadline: float) -> Share:
    command = ["compute-sanitizer", "--tool", tool, *OPTIONS[tool], "--target-processes", "all"]
    command += ["--error-exitcode", "9", sys.executable, "-m", "pytest", "-v", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "-m", "", *share.tests]  # whatever their marks
    begin = time.monotonic()
    left = deadline - begin
    if left <= 0:
        return share
    # references are on the CPU, and their threads would be in each other's way
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": device, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            share.status = process.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            share.status = process.wait()
        output.seek(0)
        share.text = output.read()
    share.seconds = time.monotonic() - begin
    share.outcome = dict(OUTCOME.findall(share.text))
    summary = SUMMARY.findall(share.text)
    share.found = int(summary[-1]) if summary else None
    return share


def report(share: Share) -> None:
    counts = Counter(share.outcome.values())
    said = ", ".join(f"{count} {outcome.lower()}" for outcome, count in counts.items()) or "none ended"
    state = "clean" if share.clean else "stopped" if share.stopped else f"{share.found} findings"
    print(f"{share.seconds:5.0f} s, {len(share.tests)} tests from {share.tests[0]}: {said}; {state}")
    if share.stopped:
        print("\n".join(FINDING.findall(share.text)[:40]))
    elif not share.clean:
        print(share.text)
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tool", choices=sorted(OPTIONS), default="memcheck")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time on each device (8)")
    parser.add_argument("--devices", default="0", help="indices with commas between them (0)")
    parser.add_argument("--share", type=int, default=12, help="tests of a process (12)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then all are stopped (no limit)")
    known, options = parser.parse_known_args()
    tests = collect(["-m", "gpu and not slow", *options])
    shares = [Share(tests[i : i + known.share]) for i in range(0, len(tests), known.share)]
    devices = known.devices.split(",")
    deadline = time.monotonic() + known.seconds
    with ThreadPoolExecutor(known.jobs * len(devices)) as pool:
        runs = [
            pool.submit(run, share, known.tool, devices[i % len(devices)], deadline)
            for i, share in enumerate(shares)
        ]
        for each in runs:
            report(each.result())
    outcome = {test: result for share in shares for test, result in share.outcome.items()}
    missing = [test for test in tests if test not in outcome]
    failed = [test for test, result in outcome.items() if result in ("FAILED", "ERROR")]
    for title, names in (("not run to its end", missing), ("failed", failed)):
        for name in names:
            print(f"{title}: {name}")
    counts = Counter(outcome.values())
    found = sum(share.found or 0 for share in shares)
    print(f"{known.tool}: {len(tests)} tests, {len(missing)} of them not run to their end; {dict(counts)}")
    print(f"{found} findings of the tool")
    return 0 if all(share.clean for share in shares) else 1


if __name__ == "__main__":
    sys.exit(main())
