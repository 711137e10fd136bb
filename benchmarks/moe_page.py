"""Writes the tables and plots of docs/results/cuda-experts.md.

    python -m benchmarks.moe_page

From benchmarks/results/moe_cuda.*.json (`benchmarks.moe`), moe_peers.*.json (`benchmarks.moe_peers`),
moe_model.*.json (`benchmarks.moe_model`) and benchmarks/published_moe_h200.json, what others reached.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import layers
from benchmarks.cpu_page import fill
from benchmarks.cuda_page import PAGES, lines
from benchmarks.moe_layers import UNIFORM
from benchmarks.moe_peers import ORDINARY, OWN
from benchmarks.neighbour_chain import NEIGHBOURS
from benchmarks.neighbours import ALL, ALONE, NONE
from benchmarks.record import RESULTS
from moqext.tools.bench import PEER
from moqext.tools.bench_plot import roofline

PAGE = PAGES / "cuda-experts.md"
MARKS = ("<!-- results: python -m benchmarks.moe_page -->", "<!-- end of results -->")

FEW, START = 64, 5e-6
RATES = {layers.NVFP4: 0.87}
"""Of the floor's rate that NVFP4 reaches up to `FEW` tokens behind a start; others `FP8_RATE`."""

FP8_RATE = 0.95
MANY = 4096
SPEEDS = {layers.NVFP4: 600e12, layers.NVFP4_FP8: 850e12}
"""Operations a second with `MANY` tokens; FP8 `FP8_SPEED`."""

FP8_SPEED = 900e12

PUBLISHED = Path(__file__).parent / "published_moe_h200.json"
PUBLISHED_CHIP = "NVIDIA H200"

Row = Mapping[str, Any]


def called(algo: str | None) -> str:
    """Of a column."""
    return "torch bfloat16" if algo == PEER else f"`{algo}`"


def goal(row: Row) -> float | None:
    """Seconds that a layer by itself may take; None where nothing is asked."""
    algo = row["quant_algo"]
    if algo == PEER or row["neighbours"] != ALONE or row["routing"] != UNIFORM:
        return None
    if row["tokens"] <= FEW:
        return START + float(row["floor_seconds"]) / RATES.get(algo, FP8_RATE)
    return float(row["flop"]) / SPEEDS.get(algo, FP8_SPEED) if row["tokens"] == MANY else None


def times_table(rows: Sequence[Row], routing: str, policy: str) -> str:
    """Layers by themselves: microseconds, share of the floor, and times as fast as torch."""
    own = [row for row in rows if (row["neighbours"], row["routing"]) == (ALONE, routing)]
    algos = list(dict.fromkeys(row["quant_algo"] for row in own))
    found = {(row["tokens"], row["quant_algo"], row["policy"]): row for row in own}
    head = ["tokens", "experts", *(called(algo) for algo in algos)]
    body = []
    for tokens in dict.fromkeys(row["tokens"] for row in own):
        peer = found.get((tokens, PEER, ALL))
        line = [str(tokens), ""]
        for algo in algos:
            row = found.get((tokens, algo, ALL if algo == PEER else policy))
            line.append(_cell(row, peer))
            line[1] = f"{row['active_experts']:.0f}" if row else line[1]
        body.append(line)
    return lines(head, body, 0)


def _cell(row: Row | None, peer: Row | None) -> str:
    if row is None:
        return ""
    text = f"{row['seconds'] * 1e6:.1f} ({row['floor_seconds'] / row['seconds']:.0%})"
    if peer is None or row["quant_algo"] == PEER:
        return text
    return f"{text} **{peer['seconds'] / row['seconds']:.2f}×**"


def blocks_table(rows: Sequence[Row]) -> str:
    """Blocks of a decoder layer, and what their experts add."""
    own = [row for row in rows if row["neighbours"] in NEIGHBOURS]
    found = {
        (row["tokens"], *(row[name] for name in ("neighbours", "policy", "quant_algo"))): row for row in own
    }
    cases = [(kind, policy) for kind in NEIGHBOURS for policy in (ALL, NONE)]
    head = ["tokens", "experts in", *(f"{kind}'s, {policy}" for kind, policy in cases)]
    body = []
    for tokens, algo in dict.fromkeys((row["tokens"], row["quant_algo"]) for row in own):
        line = [str(tokens), "none" if algo is None else called(algo)]
        for kind, policy in cases:
            row = found.get((tokens, kind, policy, algo))
            least = found.get((tokens, kind, policy, None)) or found.get((tokens, kind, ALL, None))
            line.append(_added(row, least))
        body.append(line)
    return lines(head, body, 2)


def _added(row: Row | None, least: Row | None) -> str:
    if row is None:
        return ""
    text = f"{row['seconds'] * 1e6:.1f}"
    if row["quant_algo"] is None or least is None:
        return text
    return f"{text} (+{(row['seconds'] - least['seconds']) * 1e6:.1f})"


def goals_table(rows: Sequence[Row]) -> str:
    """What came and what was asked for, of layers by themselves; what was met stands in bold letters."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        most = goal(row) if row["policy"] == ALL else None
        if most is not None:
            took = f"{row['seconds'] * 1e6:.1f}"
            took = f"**{took}**" if row["seconds"] <= most else took
            cells = found.setdefault((row["model"], called(row["quant_algo"])), {})
            cells[row["tokens"]] = f"{took} / {most * 1e6:.1f}"
    tokens = sorted({count for cells in found.values() for count in cells})
    body = [[*about, *(cells.get(count, "") for count in tokens)] for about, cells in found.items()]
    return lines(["model", "experts in", *(f"T = {count}" for count in tokens)], body, 2)


Others = Mapping[tuple[str, int, str], tuple[float, str]]


def read_published(path: Path = PUBLISHED) -> dict[tuple[str, int, str], tuple[float, str]]:
    """The fastest other path by model, tokens and format: microseconds, and whose."""
    found: dict[tuple[str, int, str], tuple[float, str]] = {}
    for model, tokens, algo, peer, microseconds in json.loads(path.read_text())["cells"]:
        key = (model, tokens, algo)
        found[key] = min(found.get(key, (microseconds, peer)), (microseconds, peer))
    return found


def fastest_others(published: Others, beside: Row | None) -> Others:
    """The faster of what was published and what ran beside moqext in a process of its own."""
    found = dict(published)
    for row in beside["rows"] if beside else []:
        if row["peer"] in (OWN, ORDINARY) or row["routing"] != UNIFORM:
            continue
        key, seen = (row["model"], row["tokens"], row["quant_algo"]), (row["seconds"] * 1e6, row["peer"])
        found[key] = min(found.get(key, seen), seen)
    return found


def others_table(rows: Sequence[Row], others: Others) -> str:
    """Layers by themselves beside the fastest of other libraries, measured before on the same chip."""
    found: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in rows:
        if (row["neighbours"], row["routing"]) == (ALONE, UNIFORM) and row["quant_algo"] != PEER:
            key = (row["model"], row["quant_algo"], row["tokens"])
            found.setdefault(key, {})[row["policy"]] = row["seconds"] * 1e6
    body = []
    for (model, algo, tokens), own in found.items():
        other = others.get((model, tokens, algo))
        if other is None:
            continue
        times = [
            f"{own[name]:.1f} **{other[0] / own[name]:.2f}×**" if name in own else "" for name in (ALL, NONE)
        ]
        body.append([model, called(algo), str(tokens), *times, f"{other[0]:.1f} {other[1]}"])
    return lines(["model", "experts in", "tokens", "moqext", "not programmatically", "others"], body, 2)


def beside_table(rows: Sequence[Row]) -> str:
    """Layers beside public kernels of the same run: microseconds, and how many times as fast as theirs."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("model", "routing", "quant_algo", "tokens"))
        found.setdefault(key, {})[row["peer"]] = row
    body = []
    for (model, routing, algo, tokens), cell in found.items():
        if OWN not in cell:
            continue
        stored = layers.NVFP4 if algo == layers.NVFP4_FP8 else algo  # nobody else multiplies it so
        others = found[model, routing, stored, tokens]
        times = sorted((row["seconds"], peer) for peer, row in others.items() if peer not in (OWN, ORDINARY))
        line = [model, called(algo), routing, str(tokens), f"{cell[OWN]['floor_seconds'] * 1e6:.1f}"]
        for name in (OWN, ORDINARY):
            own = cell.get(name)
            factor = f" **{times[0][0] / own['seconds']:.2f}×**" if own and times else ""
            line.append(f"{own['seconds'] * 1e6:.1f}{factor}" if own else "")
        body.append([*line, ", ".join(f"{peer} {seconds * 1e6:.1f}" for seconds, peer in times)])
    heads = ["model", "experts in", "routing", "tokens", "floor", "moqext", "not programmatically", "others"]
    return lines(heads, body, 3)


def dated(result: Row) -> str:
    """When, and with which moqext."""
    about = result["environment"]
    return f"{about['date'][:10]}, commit {about['moqext']['commit']}"


def beside_section(result: Row) -> list[str]:
    """What was measured in one process with the kernels of others."""
    about = result["environment"]
    own = max(row["error"] for row in result["checks"] if row["peer"] == OWN)
    driver = f", driver {about['driver']}" if "driver" in about else ""
    return [
        f"#### Beside public kernels, in one process, {about['gpu']}",
        f"{dated(result)}, torch {about['torch']}{driver}; kernels of vLLM 0.33.0 and "
        "Humming 0.1.19, the same weights, tokens and routing for all "
        "([measuring.md](measuring.md#experts-on-cuda)): microseconds of a layer, with programmatic launch "
        "and without, and how many times as fast as the fastest of the others. `NVFP4, fp8` stands beside "
        "the others' products of NVFP4 in bfloat16. Errors "
        "to float32 of what NVFP4 weights mean, or of what FP8 weights and inputs were before: moqext's "
        f"largest {own:.1e}. {result.get('note', '')}".strip(),
        beside_table(result["rows"]),
    ]


def models_table(result: Row) -> str:
    """A whole model: tokens a second of all sequences, and times the faster one of bfloat16."""
    found = {(row["form"], row["weights"], row["tokens"]): row for row in result["rows"]}
    batches = list(dict.fromkeys(row["tokens"] for row in result["rows"]))
    body = []
    for form, weights in dict.fromkeys((row["form"], row["weights"]) for row in result["rows"]):
        cells = []
        for batch in batches:
            row = found.get((form, weights, batch))
            ratio = f" **{row['ratio']:.2f}×**" if row and "ratio" in row and weights != PEER else ""
            cells.append(f"{row['tokens_per_second']:.0f}{ratio}" if row else "")
        body.append([form, f"`{weights}`" if weights != PEER else weights, *cells])
    counts = [f"{batch} sequence{'s' * (batch != 1)}" for batch in batches]
    return lines(["form", "weights", *counts], body, 2)


def whole_model(result: Row) -> list[str]:
    """What was measured of it."""
    return [
        f"#### A whole model on an {result['gpu']}",
        f"Tokens a second of a model with the sizes of Qwen3-30B-A3B and {result['layers']} layers of random "
        f"weights in Transformers {result['transformers']}, {result['environment']['date'][:10]}: a step of "
        f"one token for each sequence in a CUDA graph, {result['context']} places of the cache. bfloat16 by "
        "either way of Transformers to multiply experts; `modules` has moqext's linears and experts for its "
        "own, `transformers` is what `from_pretrained` hands over. Factors are to the faster bfloat16.",
        models_table(result),
    ]


def host_table(rows: Sequence[Row]) -> str:
    """What a call outside of a graph costs the host."""
    body = [[row["model"], called(row["quant_algo"]), f"{row['seconds'] * 1e6:.1f}"] for row in rows]
    return lines(["model", "experts in", "time"], body, 2)


def model_section(model: str, sizes: Row, rows: Sequence[Row]) -> list[str]:
    """All tables of a model."""
    of_all = f" of {sizes['of_all']}" if sizes["of_all"] else ""
    parts = [
        f"#### {model}",
        f"{sizes['experts']}{of_all} experts, top {sizes['top_k']}, hidden size {sizes['hidden']}, "
        f"intermediate size {sizes['intermediate']}.",
    ]
    for routing in dict.fromkeys(row["routing"] for row in rows if row["neighbours"] == ALONE):
        for policy, how in ((ALL, "launched programmatically"), (NONE, "not")):
            parts += [f"By themselves, {routing}, {how}, µs:", times_table(rows, routing, policy)]
    if any(row["neighbours"] != ALONE for row in rows):
        parts += ["A block, µs, and in brackets what its experts add:", blocks_table(rows)]
    return parts


def section(name: str, result: Mapping[str, Any], beside: Row | None = None) -> str:
    """All tables of a chip; `beside` is what ran in one process with the kernels of others."""
    about, rows = result["environment"], result["rows"]
    worst = max(check["error"] for check in result["checks"] if check["quant_algo"] != PEER)
    rates = result["ceilings"]
    facts = (
        f"torch {about['torch']}, driver {about['driver']}, {about['date'][:10]}; copies run at "
        f"{rates['fp8']['bytes_per_second'] / 1e12:.2f} TB/s, bfloat16 products at "
        f"{rates['bfloat16']['flop_per_second'] / 1e12:.0f} and FP8 products at "
        f"{rates['fp8']['flop_per_second'] / 1e12:.0f} Tflop/s. {len(result['checks'])} outputs compared "
        f"with float64, moqext's largest relative error {worst:.1e}."
    )
    parts = [f"### {about['gpu']}", facts, f"![speed over tokens]({plot_name(name)})"]
    for model, sizes in result["models"].items():
        parts += model_section(model, sizes, [row for row in rows if row["model"] == model])
    parts += ["Reached and asked for (goals), µs, by tokens:", goals_table(rows)]
    if about["gpu"] == PUBLISHED_CHIP:
        parts += [
            "Beside the fastest of other libraries, uniform, µs, and how many times as fast moqext is. "
            "Others are from runs of their own, of this chip: one with moqext's kernels beside them"
            f"{f' ({dated(beside)}, below)' if beside else ''}, and one of 2026-11-21, all in turn, which "
            "makes some slower with 4096 tokens; the faster of the two counts:",
            others_table(rows, fastest_others(read_published(), beside)),
        ]
    if result["host"]:
        parts += [
            "What a call of one token outside of a graph costs the host, µs:",
            host_table(result["host"]),
        ]
    return "\n\n".join(parts)


def plot_name(name: str) -> str:
    """The file of a chip's plot."""
    return f"{PAGE.stem}.{name}.svg"


def plot(result: Mapping[str, Any]) -> str:
    """Operations a second of layers by themselves."""
    rows = [
        {**row, "shape": [result["models"][row["model"]][name] for name in ("hidden", "intermediate")]}
        for row in result["rows"]
        if (row["neighbours"], row["policy"], row["routing"]) == (ALONE, ALL, UNIFORM)
    ]
    return roofline(rows, f"Experts of {', '.join(result['models'])} on an {result['environment']['gpu']}")


def page_files() -> dict[str, str]:
    """The page and plots as the recorded results make them."""
    paths = sorted(RESULTS.glob("moe_cuda.*.json"))
    results = {path.name.split(".")[1]: json.loads(path.read_text()) for path in paths}
    paths = sorted(RESULTS.glob("moe_peers.*.json"))
    peers = {path.name.split(".")[1]: json.loads(path.read_text()) for path in paths}
    sections = [section(name, result, peers.get(name)) for name, result in results.items()]
    sections += ["\n\n".join(beside_section(result)) for result in peers.values()]
    for path in sorted(RESULTS.glob("moe_model.*.json")):
        sections.append("\n\n".join(whole_model(json.loads(path.read_text()))))
    text = fill(PAGE.read_text(encoding="utf-8"), *MARKS, sections)
    return {PAGE.name: text} | {plot_name(name): plot(result) for name, result in results.items()}


if __name__ == "__main__":
    for file, content in page_files().items():
        (PAGES / file).write_text(content, encoding="utf-8")
