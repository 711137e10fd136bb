"""Badges of the README as drawings of its own: license, versions of Python, one wheel for all of them.

`python -m benchmarks.pages` writes them from pyproject.toml and setup.py.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from benchmarks import record
from moqext.tools.svg import label

ROOT = record.RESULTS.parent.parent
FOLDER = ROOT / "docs" / "badges"
LETTER = 6.6
"""Pixels of a letter, about."""


def badges() -> dict[str, tuple[str, str]]:
    """A subject and what is said of it, by the name of the file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    floor = re.search(r'"py_limited_api": "(cp\d+)"', (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert floor is not None
    return {
        "license.svg": ("license", project["license"]),
        "python.svg": ("Python", project["requires-python"].replace(">=", "≥ ")),
        "wheel.svg": ("wheel", f"abi3, {floor[1]}"),
    }


def draw(subject: str, said: str) -> str:
    """A badge as text."""
    widths = [round(LETTER * len(text)) + 14 for text in (subject, said)]
    width = sum(widths)
    left, right = widths[0] / 2, widths[0] + widths[1] / 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" viewBox="0 0 {width} 20" '
        f'font-family="sans-serif">\n<title>{subject}: {said}</title>\n'
        f'<rect width="{width}" height="20" rx="3" fill="#555555"/>\n'
        f'<rect x="{widths[0]}" width="{widths[1]}" height="20" rx="3" fill="#0072b2"/>\n'
        + label(left, 14, subject, anchor="middle", size=11, colour="#ffffff")
        + "\n"
        + label(right, 14, said, anchor="middle", size=11, colour="#ffffff")
        + "\n</svg>\n"
    )


def files() -> dict[Path, str]:
    """Every badge with its text."""
    return {FOLDER / name: draw(*about) for name, about in badges().items()}
