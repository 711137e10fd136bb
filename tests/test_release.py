"""`make release` in a repository of its own: agreement is one line, and each disagreement another."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ARCHS = "80;90a"

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


class Repository:
    """A commit of version 1.2.0 with its tag and wheels."""

    def __init__(self, home):
        self.home = home
        (home / "release").mkdir(parents=True)
        shutil.copy(ROOT / "release" / "check.py", home / "release")
        self.write("pyproject.toml", '[project]\nversion = "1.2.0"\n')
        self.write("setup.py", f'ALL_ARCHS = "{ARCHS}"\n')
        self.write("CHANGELOG.md", "# Changelog\n\n## 1.2.0, 2026-01-31\n\n## 1.1.0, 2025-01-31\n")
        self.write(".gitignore", "dist/\n")
        self.git("init", "-q")
        self.commit()
        self.git("tag", "v1.2.0")
        self.wheels()

    def write(self, name, text):
        (self.home / name).write_text(text)

    def git(self, *arguments):
        who = {f"GIT_{role}_{what}": "x" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        none = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.home,
            env=os.environ | who | none,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "x", "--allow-empty")

    def wheels(self, version="1.2.0", archs=ARCHS):
        (self.home / "dist").mkdir(exist_ok=True)
        for arch in ("x86_64", "aarch64"):
            name = f"moqext-{version}-cp311-abi3-manylinux_2_28_{arch}.whl"
            with zipfile.ZipFile(self.home / "dist" / name, "w") as wheel:
                wheel.writestr("moqext/_C.abi3.so", f"{self.git('rev-parse', '--short=12', 'HEAD')} {archs}")
                wheel.writestr(f"moqext-{version}.dist-info/METADATA", f"Name: moqext\nVersion: {version}\n")

    def check(self):
        command = [sys.executable, str(self.home / "release" / "check.py")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stderr == ""
        assert done.returncode == (0 if "can be released" in done.stdout else 1)
        return done.stdout.splitlines()


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path / "repository")


def test_what_agrees_can_be_released(repository):
    assert repository.check() == ["moqext 1.2.0 can be released: tag v1.2.0, and the wheels in dist/"]


def test_changes_that_are_not_committed_are_refused(repository):
    repository.write("README.md", "new\n")
    assert repository.check() == [
        "the tree has changes that are not committed, the first: ?? README.md",
    ]


def test_a_later_commit_has_neither_tag_nor_wheels(repository):
    repository.commit()
    assert repository.check() == [
        "this commit has no tag v1.2.0",
        "dist/moqext-1.2.0-cp311-abi3-manylinux_2_28_aarch64.whl was not built from this commit",
        "dist/moqext-1.2.0-cp311-abi3-manylinux_2_28_x86_64.whl was not built from this commit",
    ]


@pytest.mark.parametrize("head", ["1.2.0, not released", "1.3.0, 2026-01-31", "1.2.0"])
def test_the_changelog_begins_with_version_and_date(repository, head):
    repository.write("CHANGELOG.md", f"# Changelog\n\n## {head}\n")
    repository.commit()
    repository.git("tag", "-f", "v1.2.0")
    repository.wheels()
    line = f"CHANGELOG.md begins with {head!r}, and not with '1.2.0, YEAR-MONTH-DAY'"
    assert repository.check() == [line]


def test_wheels_of_another_version_are_refused(repository):
    shutil.rmtree(repository.home / "dist")
    repository.wheels(version="1.1.0")
    assert [line.split(".whl ")[1] for line in repository.check()] == [
        "is missing: make wheel wheel-aarch64",
        "is missing: make wheel wheel-aarch64",
        "is not of this release",
        "is not of this release",
    ]


def test_a_wheel_without_every_architecture_is_refused(repository):
    repository.wheels(archs="90a")
    assert repository.check() == [
        "dist/moqext-1.2.0-cp311-abi3-manylinux_2_28_aarch64.whl has not CUDA for every architecture",
        "dist/moqext-1.2.0-cp311-abi3-manylinux_2_28_x86_64.whl has not CUDA for every architecture",
    ]
