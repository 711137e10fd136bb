"""Says whether this commit can be released: version, CHANGELOG, tag and the wheels of dist/ agree.

Every disagreement is one line, and the exit status 1. Nothing is built, tagged or uploaded.
"""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = ("x86_64", "aarch64")


def git(*arguments):
    """What git prints about this checkout, by lines."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout.splitlines()


def of_source(version):
    """What in the checkout does not agree with `version` of pyproject.toml."""
    dirty = git("status", "--porcelain")
    if dirty:
        yield f"the tree has changes that are not committed, the first: {dirty[0]}"
    head = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if not head or not re.fullmatch(rf"{re.escape(version)}, \d{{4}}-\d\d-\d\d", head[1]):
        found = head[1] if head else "nothing"
        yield f"CHANGELOG.md begins with {found!r}, and not with '{version}, YEAR-MONTH-DAY'"
    if f"v{version}" not in git("tag", "--points-at", "HEAD"):
        yield f"this commit has no tag v{version}"


def of_wheels(version):
    """What of the wheels in dist/ is missing, too much, or of something else than this commit."""
    names = {f"moqext-{version}-cp311-abi3-manylinux_2_28_{arch}.whl" for arch in ARCHITECTURES}
    there = {path.name for path in ROOT.glob("dist/*")}
    yield from (f"dist/{name} is missing: make wheel wheel-aarch64" for name in sorted(names - there))
    yield from (f"dist/{name} is not of this release" for name in sorted(there - names))
    commit = git("rev-parse", "--short=12", "HEAD")[0].encode()
    archs = re.search(r'^ALL_ARCHS = "(.+)"$', (ROOT / "setup.py").read_text(), re.MULTILINE)[1].encode()
    for name in sorted(names & there):
        with zipfile.ZipFile(ROOT / "dist" / name) as wheel:
            library = wheel.read("moqext/_C.abi3.so")
            metadata = wheel.read(f"moqext-{version}.dist-info/METADATA").decode()
        if f"\nVersion: {version}\n" not in metadata:
            yield f"dist/{name}: its metadata tell another version"
        if commit not in library:
            yield f"dist/{name} was not built from this commit"
        if archs not in library:
            yield f"dist/{name} has not CUDA for every architecture"


def main():
    """Prints every disagreement, or what can be released."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    wrong = [*of_source(version), *of_wheels(version)]
    print("\n".join(wrong or [f"moqext {version} can be released: tag v{version}, and the wheels in dist/"]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
