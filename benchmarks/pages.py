"""Writes what is generated on the pages: tables between markers, drawings of docs/results, and badges.

    python -m benchmarks.pages

A page has `<!-- NAME -->` and `<!-- /NAME -->` around what is written: the summary of a subject of
`benchmarks.subjects`, or a table: of speed (`speed`), of formats without a subject (`general`,
`general-experts`), or of what ran where (`support`). A subject without a result keeps what stands there.
`python -m benchmarks.tables` prints the full tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import badges, fit, pairs, record, support
from benchmarks.goals import geomean
from benchmarks.grid import table
from benchmarks.layers import W4A16, shape_of
from benchmarks.moe_layers import UNIFORM
from benchmarks.neighbours import ALONE
from benchmarks.pairs import RANGES, Pair, range_of
from benchmarks.subjects import SUBJECTS, Subject

ROOT = record.RESULTS.parent.parent
RESULTS = ROOT / "docs" / "results"
MARKED = re.compile(r"(<!-- ([\w-]+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)

CHIPS = {
    "h100": "H100",
    "h200": "H200",
    "xeon-amx": "Xeon",
    "epyc-avx2": "EPYC",
    "epyc-zen4": "Zen4",
}

SPEED = (
    ("fp8", "FP8 linear", "h200", "FP8_PER_CHANNEL_PER_TOKEN", "8192 × 8192", 1, pairs.ANY),
    ("nvfp4", "NVFP4 linear", "h200", "NVFP4", "8192 × 8192", 64, pairs.ANY),
    ("experts", "NVFP4 experts", "h200", "NVFP4", "Qwen3-30B-A3B", 64, pairs.PUBLIC),
    ("vllm", "NVFP4 in vLLM", "h200", "NVFP4", "Llama 8B, torch.compile", 1, "vLLM's kernels"),
    ("cpu-linears", "NVFP4 on a CPU", "xeon-amx", "NVFP4", "4096 × 14336", 1, pairs.GGML),
)
"""Lines of the table of speed: subject, regime, machine, format, case, tokens, and what it stands beside."""


def speed() -> str:
    """Single cells beside the public best, and the mean of all cells of their regime."""
    body = []
    for subject, name, chip, algo, case, tokens, beside in SPEED:
        alike = [
            pair
            for pair in SUBJECTS[subject].pairs()
            if (pair.chip, pair.algo, pair.beside) == (chip, algo, beside)
            and range_of(pair.tokens) == range_of(tokens)
        ]
        pair = next(each for each in alike if (each.case, each.tokens) == (case, tokens))
        count = f"{tokens} {'sequence' if pair.rate else 'token'}{'s' if tokens > 1 else ''}"
        where = f"{name}, {case}, {count}, {CHIPS[chip]}"
        mean = f"{geomean([each.ratio for each in alike]):.2f}×"
        other = f"{pair.shown(pair.other)} ({pair.peer})"
        file = f"`benchmarks/results/{pair.file}.jsonl`"
        body.append(
            [where, pair.shown(pair.own), other, f"{pair.ratio:.2f}×", f"{mean} of {len(alike)}", file]
        )
    head = ["regime", "moqext", "best public peer", "ratio", "mean of the regime's cells", "source"]
    return table(head, body)


GENERAL = {
    "MXFP8": "MXFP8",
    "FP8_PER_CHANNEL_PER_TOKEN": "MXFP8, fp8",
    "W8A16": "W8A16",
    "W8A8_SQ_PER_CHANNEL": "W8A8",
    "W4A16_AWQ": "AWQ",
}
"""Columns of the table of other formats, by their layer in benchmarks/times; with `fp8` MXFP8 is FP8."""


def general() -> str:
    """Microseconds of the chosen kernels of one layer in other formats, beside bfloat16 of torch."""
    rows = record.read_all("linear_cuda")["h200"]["rows"]
    plain = {
        row["tokens"]: row["seconds"] * 1e6
        for row in rows
        if row["quant_algo"] == "bfloat16" and tuple(row["shape"]) == shape_of(LAYER)
    }
    return _general(LAYER, (1, 16, 64, 256, 1024, 4096), plain)


def general_experts() -> str:
    """Microseconds of a layer of experts in other formats, beside torch's grouped product."""
    rows = record.read_all("moe_cuda")["h200"]["rows"]
    wanted = ("bfloat16", MODEL, ALONE, UNIFORM)
    names = ("quant_algo", "model", "neighbours", "routing")
    plain = {
        row["tokens"]: row["seconds"] * 1e6 for row in rows if tuple(row[name] for name in names) == wanted
    }
    return _general(MODEL, (1, 64, 512, 4096), plain)


LAYER, MODEL = "28672x4096", "Qwen3-30B-A3B"


def _general(where: str, counts: Sequence[int], plain: Mapping[int, float]) -> str:
    times, body = fit.read(), []
    for tokens in counts:
        cells = [fit.Cell("H200 SXM", layer, where, tokens) for layer in GENERAL]
        own = [times[cell][fit.chosen(cell, times[cell])] for cell in cells]
        body.append([str(tokens), *(f"{time:.0f}" for time in (plain[tokens], *own))])
    return table(["tokens", "bfloat16", *GENERAL.values()], body, left=0)


def summary(measured: Sequence[Pair], by_case: bool) -> str:
    """How many times as fast as others: a line for each format, a column for each range of tokens."""
    cases = by_case and len({pair.case for pair in measured}) > 1
    groups: dict[tuple[str, ...], list[Pair]] = {}
    for pair in measured:
        key = (CHIPS.get(pair.chip, pair.chip), pair.algo, *([pair.case] if cases else []), pair.beside)
        groups.setdefault(key, []).append(pair)
    columns: list[tuple[str, Callable[[Sequence[Pair]], str]]] = []
    for span in RANGES:
        tokens = sorted({pair.tokens for pair in measured if range_of(pair.tokens) == span})
        if tokens:
            head = str(tokens[0]) if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]}"
            columns.append((head, partial(_mean, span, by_case)))
    if not by_case:
        columns += [("slower", _slower), ("slowest cell", _slowest)]
    if any(pair.plain for pair in measured):
        columns.append(("without PDL", _plain))
    if any(pair.goals for pair in measured):
        columns.append(("goals met", _met))
    body = [[*key, *(show(group) for _, show in columns)] for key, group in groups.items()]
    keys = ["machine", "format", *(["case"] if cases else []), "beside"]
    return table([*keys, *(head for head, _ in columns)], body, len(keys))


def _mean(span: tuple[int, int], by_case: bool, group: Sequence[Pair]) -> str:
    """The geometric mean of a range of tokens, with the slowest cell, or the time where there is one."""
    some = [pair for pair in group if range_of(pair.tokens) == span]
    if not some:
        return ""
    mean = f"{geomean([pair.ratio for pair in some]):.2f}×"
    if not by_case:
        return f"{mean} ({min(pair.ratio for pair in some):.2f})"
    alike = len({pair.tokens for pair in some}) == 1
    own = some[0].shown(geomean([pair.own for pair in some])).removesuffix(" tokens/s")
    return f"{own}, {mean}" if alike else mean


def _slower(group: Sequence[Pair]) -> str:
    return f"{sum(pair.ratio < 1 for pair in group)}/{len(group)}"


def _slowest(group: Sequence[Pair]) -> str:
    """The slowest cell, where it is slower than the other path."""
    worst = min(group, key=lambda pair: pair.ratio)
    if worst.ratio >= 1:
        return ""
    return f"{worst.case}, {worst.tokens}: {worst.shown(worst.own)}, {worst.peer} {worst.shown(worst.other)}"


def _plain(group: Sequence[Pair]) -> str:
    ratios = [pair.other / pair.plain for pair in group if pair.plain]
    return f"{geomean(ratios):.2f}× ({min(ratios):.2f})" if ratios else ""


def _met(group: Sequence[Pair]) -> str:
    asked = [met for pair in group for _, met in pair.goals]
    return f"{sum(asked)}/{len(asked)}" if asked else ""


def facts(subject: Subject) -> str:
    """Machines and versions that figures depend on: a line for each result."""
    body = []
    for benchmark in subject.benchmarks:
        for chip, result in record.read_all(benchmark).items():
            about = result["environment"]
            machine = about.get("gpu") or result.get("gpu") or result.get("device") or about["cpu"]
            found = {**about, **result}
            versions = [f"{name} {found[name]}" for name in VERSIONS if name in found]
            runs = result.get("runs", [about])
            dates, commits = (dict.fromkeys(each) for each in zip(*map(_when, runs), strict=True))
            when = [", ".join(dates), ", ".join(f"`{commit}`" for commit in commits)]
            body.append([machine, *when, ", ".join([*versions, *_rates(result)]), f"`{benchmark}.{chip}`"])
    return table(["machine", "date", "commit", "with", "file in benchmarks/results"], body, 5)


def _when(run: Mapping[str, Any]) -> tuple[str, str]:
    return run["date"][:10], run["moqext"]["commit"][:7]


VERSIONS = ("threads", "torch", "transformers", "vllm")


def _rates(result: Mapping[str, Any]) -> list[str]:
    """Rates that floors are made of."""
    if "ceilings" in result:
        copy = result["ceilings"]["fp8"]["bytes_per_second"] / 1e12
        products = [result["ceilings"][kind]["flop_per_second"] / 1e12 for kind in ("bfloat16", "fp8")]
        return [f"copies {copy:.2f} TB/s", f"products {products[0]:.0f} and {products[1]:.0f} Tflop/s"]
    if "cache_bytes_per_second" in result:
        rates = {what: result[f"{what}_bytes_per_second"] / 1e9 for what in ("read", "cache", "write")}
        return [f"{what} {rate:.1f} GB/s" for what, rate in rates.items()]
    if "bytes_per_second" in result:
        return [f"memory {result['bytes_per_second'] / 1e9:.0f} GB/s"]
    if "copy_bytes_per_second" in result:
        return [f"copies {result['copy_bytes_per_second'] / 1e12:.2f} TB/s"]
    return []


def section(name: str) -> str:
    """A subject's summary."""
    subject = SUBJECTS[name]
    parts = [facts(subject)]
    measured = [pair for pair in subject.pairs() if pair.algo != W4A16]  # which has the kernels of NVFP4
    if measured:
        unit = "tokens a second" if measured[0].rate else "time"
        cells = f"{unit}, and times as fast" if subject.by_case else "geometric mean (and slowest cell)"
        parts.append(f"How many times as fast as others, by tokens; {cells}:")
        parts.append(summary(measured, subject.by_case))
    for grid in subject.shown:
        for chip, result in record.read_all(grid.benchmark).items():
            parts += [f"`{grid.benchmark}.{chip}`:", grid.table(result)]
    parts += [f"![{name}: speed by tokens]({file})" for file, _ in subject.plots()]
    parts.append(f"`python -m benchmarks.tables {name}` prints every cell.")
    return "\n\n".join(parts)


def fill(page: str) -> str:
    """The page with everything between markers as the results make it, where there are some.

    Raises:
        KeyError: Nothing has the name of a marker.
    """

    def write(found: re.Match[str]) -> str:
        if found[2] in SUBJECTS and not SUBJECTS[found[2]].measured:
            return found[0]
        return f"{found[1]}\n{made(found[2])}\n\n{found[3]}"

    return MARKED.sub(write, page)


def made(name: str) -> str:
    """The text that a marker's name stands for."""
    tables = {
        "speed": speed,
        "general": general,
        "general-experts": general_experts,
        "support": support.section,
    }
    return tables[name]() if name in tables else section(name)


def files() -> dict[Path, str]:
    """Every file that is generated or has a generated part, with its text."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {page: fill(page.read_text(encoding="utf-8")) for page in pages}
    for subject in SUBJECTS.values():
        found |= {RESULTS / name: drawing for name, drawing in subject.plots()}
    return found | badges.files()


def main() -> None:
    """Writes the files that change."""
    for path, text in files().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
