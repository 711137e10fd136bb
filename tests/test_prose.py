"""Comments and docstrings begin with their subject or a verb, and lines of pages fit a screen.

A first word such as "Those" or "Such" points at another comment, which a reader may never see.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEANING = re.compile(
    r"(?:Of|Those|These|What|Likewise|(?:The )?[Ss]ame|That of|Such|Whose|Them|Its?|Also|But|And|So|As|Both"
    r"|Another|The others?)\b"
)
RELATIVE = re.compile(r"Where\b[^,:;]*(?:[.:;]|$)")
"""A sentence of one clause: "Where rows begin." has no subject, "Where rows begin, x is read." has one."""

SUSPECT = re.compile(rf"[#\"'][#!*=\s-]*(?:{LEANING.pattern}|Where\b)".replace(" ", r"\s+"))
"""Python that may have such a comment or docstring; few files have any, and parsing all takes seconds."""

C_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|/\*(.*?)\*/|//([^\n]*)', re.DOTALL)
LONGEST_LINE = 160


def c_comments(text):
    """(line, text) of every comment; lines of // that follow each other are one."""
    found = []
    for match in C_TOKEN.finditer(text):
        block, line = match.groups()
        number = text.count("\n", 0, match.start()) + 1
        if block is not None:
            found.append([number, re.sub(r"\n\s*\*", "\n", block)])
        elif line is not None:
            whole_line = not text[: match.start()].rpartition("\n")[2].strip()
            if whole_line and found and found[-1][2:] == [number - 1]:
                found[-1][1] += "\n" + line
                found[-1][2] = number
            else:
                found.append([number, line, *([number] if whole_line else [])])
    return [(number, comment) for number, comment, *_ in found]


def python_comments(text):
    """(line, text) of every comment and docstring, those of attributes included, where one is suspect."""
    if not SUSPECT.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        text_of = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value
        if isinstance(text_of, str):
            yield node.lineno, text_of
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        whole_line = not token.line[:column].strip()
        if not (whole_line and line == last + 1):
            yield line, token.string.lstrip("#!")
        last = line if whole_line else -1


def leans(comment):
    """Whether the first word stands for something outside of the comment."""
    words = " ".join(comment.split()).lstrip("*-=# ")
    return LEANING.match(words) or RELATIVE.match(words.partition(". ")[0] + ".")


def files(*suffixes):
    folders = {"csrc", "moqext", "python", "tests", "benchmarks"}
    paths = (path for folder in sorted(folders) for path in sorted((ROOT / folder).rglob("*")))
    return [path for path in paths if path.suffix in suffixes and "third_party" not in path.parts]


def long_lines(text):
    """(line, text) of lines that are too long, outside of tables and of fenced code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("|") and len(line) > LONGEST_LINE:
            yield number, line


def offenders(paths, find):
    return [
        f"{path.relative_to(ROOT)}:{number}: {' '.join(text.split())[:90]}"
        for path in paths
        for number, text in find(path.read_text(encoding="utf-8"))
    ]


def leaning(comments):
    return lambda text: [(number, comment) for number, comment in comments(text) if leans(comment)]


def test_comments_of_c_begin_with_their_subject():
    assert offenders(files(".c", ".h", ".cu", ".cuh"), leaning(c_comments)) == []


def test_comments_and_docstrings_of_python_begin_with_their_subject():
    assert offenders(files(".py", ".pyi"), leaning(python_comments)) == []


def test_lines_of_pages_fit_a_screen():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")]
    assert offenders(sorted(pages), long_lines) == []


def test_first_words_are_told_apart():
    for text in (
        *("Of one expert.", "Those of all.", "The same for x.", "Same as y.", "That of the engine."),
        *("What x is.", "Its bytes.", "Both agree.", "Where the rows begin.", "* Likewise, of y."),
    ):
        assert leans(text), text
    for text in (
        *(
            "Offsets of rows.",
            "Somewhat slower.",
            "Asks for codes.",
            "Whatever x is, y is 0.",
            "of one expert",
        ),
        *("Where there is no GPU, tests are skipped.", "That x is y is checked.", "Item of a list."),
    ):
        assert not leans(text), text


def test_comments_are_found():
    c = 'int a; /* Of b. */\nchar *s = "/* no */";\n// A\n// Those\nint b; // Its size\n/* Two\n * Such */\n'
    assert [(n, " ".join(text.split())) for n, text in c_comments(c)] == [
        (1, "Of b."), (3, "A Those"), (5, "Its size"), (6, "Two Such"),
    ]  # fmt: skip
    python = '"""Head."""\nx = "no # no"  # Its\n"""Of x."""\n# One\n# Those\ndef f():\n    """Such."""\n'
    found = sorted((n, text.strip()) for n, text in python_comments(python))
    assert found == [(1, "Head."), (2, "Its"), (3, "Of x."), (4, "One"), (7, "Such.")]
    assert list(long_lines("|" + "x" * 200 + "\n```\n" + "x" * 200 + "\n```\n" + "y" * 161)) == [
        (5, "y" * 161)
    ]
