"""Writes the tables of docs/results/cpu-linears.md, and plots.

They are made from benchmarks/results/linear_cpu.*.json and ggml_cpu.*.json.

python -m benchmarks.cpu_page
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from moqext.cli.bench import limits, title
from moqext.cli.text import duration
from moqext.tools.bench import PEER
from moqext.tools.bench_plot import roofline

PAGES = record.RESULTS.parent.parent / "docs" / "results"
PAGE = PAGES / "cpu-linears.md"
BEGIN, END = "<!-- results: python -m benchmarks.cpu_page -->", "<!-- end of results -->"

PEER_BEGIN, PEER_END = "<!-- llama.cpp: python -m benchmarks.cpu_page -->", "<!-- end of llama.cpp -->"

Rows = Sequence[Mapping[str, Any]]


def fill(page: str, begin: str, end: str, sections: Sequence[str]) -> str:
    """The page with what stands between two markers replaced."""
    head, rest = page.split(begin)
    _, tail = rest.split(end)
    text = "\n\n".join(sections) or "No result is recorded yet."
    return f"{head}{begin}\n\n{text}\n\n{end}{tail}"


def render(page: str, results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """File name -> text of the page with its tables, and of the plots.

    Args:
        page: The page as it is; what stands between the markers is replaced.
        results: By the name of the processor, what benchmarks.linear_cpu wrote.
    """
    files = {}
    sections = []
    for name, result in results.items():
        about = title(result["environment"], result)
        plot = f"{PAGE.stem}.{name}.svg"
        files[plot] = roofline(result["rows"], about)
        sections += [
            f"### {about}",
            facts(result),
            table(result["rows"]),
            f"![Roofline: operations a second over tokens]({plot})",
            goals(result["rows"]),
        ]
    files[PAGE.name] = fill(page, BEGIN, END, sections)
    return files


def render_peer(page: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with the tables of llama.cpp.

    Args:
        page: As for `render`.
        results: By the name of the processor, what benchmarks.ggml_cpu wrote.
    """
    sections = []
    for result in results.values():
        ggml = result["ggml"]
        built = f"ggml {ggml['version']}, built for {', '.join(ggml['features'])}"
        sections += [
            f"{title(result['environment'], result)}; {built}. {facts(result)}",
            table(result["rows"]),
        ]
    return fill(page, PEER_BEGIN, PEER_END, sections)


def page_files() -> dict[str, str]:
    """File name -> text of everything that is written, from the page and the results as they are."""
    files = render(PAGE.read_text(), read_results("linear_cpu"))
    files[PAGE.name] = render_peer(files[PAGE.name], read_results("ggml_cpu"))
    return files


def facts(result: Mapping[str, Any]) -> str:
    """What the figures depend on, in a paragraph."""
    about = result["environment"]
    versions = f"Python {about['python']}, NumPy {about['numpy']}, torch {about.get('torch', 'none')}"
    commit = about["moqext"]["commit"]
    return f"{versions}, moqext {commit}, {about['date'][:10]}; {limits(result)}."


def table(rows: Rows) -> str:
    """A line for each layer and number of tokens, a column for each algorithm."""
    algos = list(dict.fromkeys(row["quant_algo"] for row in rows))
    heads = ["torch bfloat16" if algo == PEER else f"`{algo}`" for algo in algos]
    lines = [["N × K", "M", *heads], ["---", "---:", *("---:" for _ in algos)]]
    groups: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        groups.setdefault((*row["shape"], row["tokens"]), {})[row["quant_algo"]] = cell(row)
    for (outs, ins, tokens), cells in groups.items():
        lines.append([f"{outs} × {ins}", str(tokens), *(cells.get(algo, "") for algo in algos)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(row: Mapping[str, Any]) -> str:
    """Time, part of the floor, and speed as a multiple of torch's."""
    text = f"{duration(row['seconds'])}, {row['floor_seconds'] / row['seconds']:.0%}"
    if row["quant_algo"] == PEER or row["torch_ratio"] is None:
        return text
    return f"{text}, **{row['torch_ratio']:.2f}×**"


def goals(rows: Rows) -> str:
    """A line for each algorithm and number of tokens that has a goal: the slowest and the fastest layer."""
    lines = ["| algorithm | M | goal | reached, by layer | |", "|---|---:|---:|---:|---|"]
    groups: dict[tuple[str, int, float], list[float]] = {}
    for row in rows:
        if row["goal"] is not None and row["torch_ratio"] is not None:
            groups.setdefault((row["quant_algo"], row["tokens"], row["goal"]), []).append(row["torch_ratio"])
    for (algo, tokens, goal), ratios in groups.items():
        reached = f"{min(ratios):.2f} to {max(ratios):.2f}"
        verdict = "met" if min(ratios) >= goal else "missed"
        lines.append(f"| `{algo}` | {tokens} | {goal} | {reached} | {verdict} |")
    return "\n".join(lines)


def read_results(benchmark: str, folder: Path = record.RESULTS) -> dict[str, dict[str, Any]]:
    """Name of the processor -> result, in order of names."""
    files = sorted(folder.glob(f"{benchmark}.*.json"))
    return {path.name.split(".")[1]: json.loads(path.read_text()) for path in files}


def main() -> None:
    """Writes the page and the plots."""
    for name, text in page_files().items():
        (PAGES / name).write_text(text, encoding="utf-8")
        print(f"written: docs/results/{name}")


if __name__ == "__main__":
    main()
