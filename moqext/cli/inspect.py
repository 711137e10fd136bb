"""`python -m moqext inspect`: what is in a checkpoint, and what is wrong with it.

The text groups layers that differ only in the numbers of their names. The JSON has every layer, and keeps its
keys: a new one may be added, and `schema` counts up when one changes its meaning.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import isfinite
from typing import Any

from moqext.algorithms import ALGORITHMS
from moqext.checkpoint import Checkpoint
from moqext.cli import add_checkpoint, find, open_checkpoint, plain, text
from moqext.cli import problems as problem_list
from moqext.cli.layout import add_layout_options, layout_options
from moqext.cli.page import page
from moqext.cli.select import no_match, select
from moqext.layers.expert_form import has_method
from moqext.layers.linear import LinearMethod
from moqext.reader.files.whole import output_path, refuse_unwritable, write_whole
from moqext.reader.findings.decision import ask
from moqext.reader.formats.stored import tensor_bytes
from moqext.reader.naming import name_pattern, parse_expert_name, parse_tensor_name
from moqext.reader.problems import SEVERITIES, Problem, worst_severity
from moqext.reader.records import Findings, LayerRecord, Projection

SCHEMA = 1


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "inspect",
        help="what is in a checkpoint, and what is wrong with it",
        description="Prints the quantized layers of a ModelOpt checkpoint by kind, its cache scales, and its "
        "problems. A directory with only the JSON files will do: then it prints what the configuration says. "
        "Exit status: 0, 1 with --strict or --fail-on and such a problem, 2 for an unreadable directory.",
    )
    add_checkpoint(parser)
    parser.add_argument("--layers", metavar="GLOB", help="list each layer whose name matches; * crosses dots")
    parser.add_argument("--problems", action="store_true", help="list every problem, not only the first ones")
    fail = parser.add_mutually_exclusive_group()
    fail.add_argument("--strict", action="store_true", help="exit with 1 on any problem, notes included")
    fail.add_argument("--fail-on", choices=SEVERITIES, help="exit with 1 on a problem at least so severe")
    parser.add_argument("--deep", action="store_true", help="check all block scales, however large")
    parser.add_argument("--html", type=output_path, metavar="FILE", help="also write a page for a browser")
    add_layout_options(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Executes the subcommand and returns the exit status."""
    if args.html is not None:
        refuse_unwritable(args.html)
    with open_checkpoint(args, headers_only=not args.deep, **layout_options(args)) as checkpoint:
        findings = find(checkpoint, block_scales=True if args.deep else None)
        problems = (*checkpoint.file_problems, *findings.all_problems())
        if args.html is not None:
            write_whole(args.html, page(checkpoint, findings, problems, deep=args.deep))
        if args.json:
            json.dump(as_data(checkpoint, findings, problems, args.layers), sys.stdout, indent=1)
            print()
        else:
            text.show(as_text(checkpoint, findings, problems, args.layers, all_problems=args.problems))
    least = "note" if args.strict else args.fail_on
    worst = worst_severity(problems)
    return int(bool(least and worst) and SEVERITIES.index(worst) <= SEVERITIES.index(least))


# JSON


def as_data(
    checkpoint: Checkpoint, findings: Findings, problems: Sequence[Problem], glob: str | None
) -> dict[str, Any]:
    """The report as plain data for JSON."""
    config = checkpoint.config
    return {
        "schema": SCHEMA,
        "directory": checkpoint.name,
        "producer": checkpoint.producer,
        "architectures": list(checkpoint.architectures),
        "config": None
        if config is None
        else {
            "quant_algo": config.quant_algo,
            "kv_cache_quant_algo": config.kv_cache_quant_algo,
            "group_size": config.group_size,
            "exclude_modules": list(config.exclude_modules),
            "producer": config.producer._asdict(),
            "conflicts": [conflict._asdict() for conflict in config.conflicts],
        },
        "totals": totals(checkpoint, findings),
        "layers": [_layer_data(layer) for layer in select(findings.layers, glob)],
        "kv_scales": [
            {"name": kv.name, "tensors": dict(kv.tensors), "values": _numbers(kv.values)}
            for kv in findings.kv
        ],
        "configured": None if checkpoint.files.has_weights else configured(checkpoint),
        "problems": problem_list.as_data(problems),
        "unquantized": plain.as_data(plain.plain_tensors(checkpoint, findings, glob)),
    }


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    """The values with null for what JSON has no number for."""
    return {role: value if isfinite(value) else None for role, value in values.items()}


def totals(checkpoint: Checkpoint, findings: Findings) -> dict[str, Any]:
    """Counts and bytes of the whole checkpoint; bits per weight count the scales in."""
    total = sum(tensor_bytes(info) for info in checkpoint.tensors.values())
    quantized = sum(layer.size for layer in findings.layers)
    weights = sum(layer.weights for layer in findings.layers)
    by_algo: dict[str, dict[str, Any]] = {}
    for layer in findings.layers:
        empty = {"layers": 0, "weights": 0, "bytes": 0, "runnable": is_runnable(layer.quant_algo)}
        row = by_algo.setdefault(layer.quant_algo, empty)
        row["layers"] += 1
        row["weights"] += layer.weights
        row["bytes"] += layer.size
    return {
        "files": len(checkpoint.files.files),
        "tensors": len(checkpoint.tensors),
        "bytes": total,
        "quantized_layers": len(findings.layers),
        "quantized_weights": weights,
        "quantized_bytes": quantized,
        "quantized_bits_per_weight": round(8 * quantized / weights, 4) if weights else None,
        "by_algo": dict(by_algo),
    }


@cache
def is_runnable(quant_algo: str) -> bool:
    """Whether linears of this algorithm can be loaded and run, not only read."""
    try:
        LinearMethod(quant_algo, 128, [128])
    except ValueError:
        return False
    return True


def _layer_data(layer: LayerRecord) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": layer.name,
        "kind": layer.kind,
        "quant_algo": layer.quant_algo,
        "config_algo": layer.config_algo,
        "stored_algo": layer.stored_algo,
        "rule": layer.rule,
        "group_size": layer.group_size,
        "shape": list(layer.shape),
        "bytes": layer.size,
        "weights": layer.weights,
        "scale_layout": layer.scale_layout,
        "nibbles": layer.nibbles,
        "tensors": dict(layer.tensors),
    }
    if layer.members:
        data["members"] = [_layer_data(member) for member in layer.members]
    if layer.projections:
        data["projections"] = [_projection_data(projection) for projection in layer.projections]
    return data


def _projection_data(projection: Projection) -> dict[str, Any]:
    return {
        "role": projection.role,
        "name": projection.name,
        "quant_algo": projection.quant_algo,
        "shape": list(projection.shape),
        "transposed": projection.transposed,
        "block_axis": projection.block_axis,
        "group_size": projection.group_size,
        "interleaved": projection.interleaved,
        "scale_layout": projection.scale_layout,
        "nibbles": projection.nibbles,
    }


def configured(checkpoint: Checkpoint) -> dict[str, str]:
    """For a directory without weights: the modules its index says are quantized, and their algorithm."""
    config = checkpoint.config
    modules: dict[str, str] = {}
    for name in checkpoint.files.named:
        named = parse_tensor_name(name)
        if config is not None and named is not None and named.role == "weight_scale":
            modules[named.module] = ask(config, named.module)[0].quant_algo or "not configured"
    return modules


# Text


def as_text(
    checkpoint: Checkpoint,
    findings: Findings,
    problems: Sequence[Problem],
    glob: str | None,
    *,
    all_problems: bool,
) -> list[str | text.Line]:
    """The report as lines of text."""
    columns = text.width()
    lines: list[str | text.Line] = [*_header(checkpoint, columns), ""]
    rest = plain.plain_tensors(checkpoint, findings, glob)
    if not checkpoint.files.has_weights:
        lines += _configured_table(checkpoint, columns)
    elif glob is None:
        lines += _kind_table(findings.layers, columns)
        lines += _unrunnable(checkpoint, findings, columns)
    else:
        lines += _layer_table(findings.layers, glob, [info.name for info in rest], columns)
    if rest:
        names = [linear.name for layer in findings.layers for linear in layer.linears()]
        lines += ["", *plain.as_text(rest, names, columns)]
    lines += ["", *_kv_lines(checkpoint, findings)]
    if checkpoint.headers_only:
        lines += text.wrap(
            "Only headers were fetched: values of scales are not judged; --deep fetches all.", columns
        )
    if not problems:
        return [*lines, "Problems: none"]
    worst = worst_severity(list(problems))
    lines.append(text.Line(f"Problems: {problem_list.counts(problems)}", worst))
    lines += problem_list.as_text(problems, columns, every=all_problems)
    return [*lines, *problem_list.repair_hint(problems, columns)]


def _header(checkpoint: Checkpoint, columns: int | None) -> list[str]:
    config = checkpoint.config
    facts = [checkpoint.producer, *checkpoint.architectures]
    files = checkpoint.files
    if files.has_weights:
        total = text.size(sum(tensor_bytes(info) for info in files.tensors.values()))
        facts.append(f"{text.plural(len(files.files), 'file')}, {text.plural(len(files), 'tensor')}, {total}")
    else:
        facts.append("no weights")
    lines = text.wrap(checkpoint.name, columns)
    lines += text.wrap(" · ".join(fact for fact in facts if fact), columns, indent=2)
    if config is None:
        return [*lines, "  no quantization configuration"]
    says = [config.quant_algo or "no algorithm for weights"]
    if config.quantized_layers:
        says.append(f"{text.plural(len(config.quantized_layers), 'module')} listed")
    if config.exclude_modules:
        says.append(text.plural(len(config.exclude_modules), "exclusion"))
    return [*lines, "  configured: " + ", ".join(says)]


def _shape(layer: LayerRecord) -> str:
    if layer.kind == "moe" and len(layer.shape) == 3:
        experts, hidden, intermediate = layer.shape
        return f"{experts} × ({intermediate} × {hidden})"
    return " × ".join(map(str, layer.shape))


def _bits(size: int, weights: int) -> str:
    return f"{8 * size / weights:.2f}" if weights else ""


_HEADER = ("quantized layers", "", "algorithm", "shape", "size", "bits")


def _kind_table(layers: Sequence[LayerRecord], columns: int | None) -> list[str]:
    """One row per kind of layer: same name but for numbers, same format, same shape."""
    kinds: dict[tuple[str, str, str], list[LayerRecord]] = defaultdict(list)
    for layer in layers:
        kinds[name_pattern(layer.name), layer.stored_form, _shape(layer)].append(layer)
    variants = Counter(pattern for pattern, _, _ in kinds)
    rows = [_HEADER]
    for (pattern, algo, shape), alike in kinds.items():
        size, weights = sum(layer.size for layer in alike), sum(layer.weights for layer in alike)
        count = f"× {len(alike)}" if "*" in pattern else ""
        # Where one pattern stands in several rows, the numbers tell which layers each is about.
        name = text.numbered(pattern, [layer.name for layer in alike]) if variants[pattern] > 1 else pattern
        rows.append((name, count, algo, shape, text.size(size), _bits(size, weights)))
    if not layers:
        return ["  no quantized layers"]
    size, weights = sum(layer.size for layer in layers), sum(layer.weights for layer in layers)
    rows.append((f"all {len(layers):,}", "", "", "", text.size(size), _bits(size, weights)))
    return _joined(text.table(rows, "<><>>>", columns))


def _joined(rows: Iterable[list[str]]) -> list[str]:
    return [line for lines in rows for line in lines]


def _layer_table(
    layers: Sequence[LayerRecord], glob: str, others: Sequence[str], columns: int | None
) -> list[str]:
    """One row per layer that matches; `others` are tensors that do and are not quantized."""
    chosen = list(select(layers, glob))
    if not chosen:
        if others:
            return [f"  no quantized layer matches {glob!r}"]
        names = dict.fromkeys(linear.name for layer in layers for linear in layer.linears())
        return text.wrap(no_match(glob, names), columns, indent=2)
    rows = [("layer", "algorithm", "decided by", "shape", "size", "bits")]
    for layer in chosen:
        rule = layer.rule.partition(":")[0] if layer.quant_algo == layer.config_algo else "tensors"
        size = text.size(layer.size)
        rows.append(
            (layer.name, layer.stored_form, rule, _shape(layer), size, _bits(layer.size, layer.weights))
        )
    return _joined(text.table(rows, "<<<>>>", columns))


def _configured_table(checkpoint: Checkpoint, columns: int | None) -> list[str]:
    kinds: Counter[tuple[str, str]] = Counter()
    for module, algo in configured(checkpoint).items():
        expert = parse_expert_name(module)
        name = f"{expert.container}.*.{expert.projection}" if expert else module
        kinds[name_pattern(name), algo] += 1
    if not kinds:
        return _listed_table(checkpoint, columns)
    rows = [("quantized modules, by the index", "", "configured as")]
    rows += [(pattern, text.times(count), algo) for (pattern, algo), count in kinds.items()]
    return _joined(text.table(rows, "<><", columns))


def _listed_table(checkpoint: Checkpoint, columns: int | None) -> list[str]:
    """A table of quantized_layers and the exclusions, where no tensor is known."""
    config = checkpoint.config
    if config is None:
        return ["  nothing is known about its layers"]
    kinds: Counter[tuple[str, str]] = Counter()
    for module, layer in config.quantized_layers.items():
        kinds[name_pattern(module), layer.quant_algo or "unquantized"] += 1
    for module in config.exclude_modules:
        kinds[name_pattern(module), "excluded"] += 1
    rows = [("modules, by the configuration", "", "configured as")]
    rows += [(pattern, text.times(count), algo) for (pattern, algo), count in kinds.items()]
    if not config.quantized_layers:
        rows.append(("every other linear", "", config.quant_algo or "unquantized"))
    return _joined(text.table(rows, "<><", columns))


def _unrunnable(checkpoint: Checkpoint, findings: Findings, columns: int | None) -> list[str]:
    """Layers that can only be read: by algorithm, and else stacks without a method, and embeddings."""
    listed: dict[str, None] = {}
    for layer in findings.layers:
        for linear in layer.linears():
            if not is_runnable(linear.quant_algo):
                listed[linear.quant_algo] = None
            elif layer.kind == "moe" and ALGORITHMS[linear.quant_algo].low_rank:
                listed[f"experts ({linear.quant_algo})"] = None
            elif linear.projections and not has_method(checkpoint, linear):
                listed[f"stacked experts ({linear.quant_algo})"] = None
            elif linear.kind in ("embedding", "convolution"):
                listed[f"{linear.kind} ({linear.quant_algo})"] = None
    if not listed:
        return []
    return text.wrap(f"recognised, not runnable: {', '.join(sorted(listed))}", columns, indent=2)


def _kv_lines(checkpoint: Checkpoint, findings: Findings) -> list[str]:
    config = checkpoint.config
    algo = None if config is None else config.kv_cache_quant_algo
    if not findings.kv:
        where = "no scales stored: 1.0" if checkpoint.files.has_weights else "scales unknown"
        return [f"KV cache: {algo}, {where}" if algo else "KV cache: not quantized"]
    lines = [
        f"KV cache: {algo or 'no algorithm configured'}, {text.plural(len(findings.kv), 'attention module')}"
    ]
    for role in ("k_scale", "v_scale", "q_scale"):
        count = sum(role in kv.tensors for kv in findings.kv)
        values = [kv.values[role] for kv in findings.kv if role in kv.values]
        if count:
            ends = dict.fromkeys(f"{value:.4g}" for value in (min(values), max(values))) if values else ()
            spread = " to ".join(ends)
            lines.append(f"  {role}  × {count}  {spread}".rstrip())
    return lines
