"""`inspect --html`: a checkpoint as one page that needs no network, and script only for comfort.

Every name on it comes from the files and is escaped; the page allows itself no other source.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import log2
from pathlib import Path
from typing import Any

from moqext.checkpoint import Checkpoint
from moqext.cli import plain, text
from moqext.cli.histogram import Histogram
from moqext.reader.advice import ADVICE
from moqext.reader.config.cache_memory import CachePart, cache_bytes, cache_parts
from moqext.reader.formats.scale_values import BLOCK_SCALES_READ, FEW, block_scale_bytes, decode_scales
from moqext.reader.formats.stored import tensor_bytes
from moqext.reader.naming import number_order
from moqext.reader.problems import SEVERITIES, Problem
from moqext.reader.records import Findings, LayerRecord, Projection

ASSETS = Path(__file__).with_name("assets")

SCALES = {
    "weight_scale": "weight scales",
    "weight_scale_2": "second-level weight scales",
    "input_scale": "activation scales",
    "pre_quant_scale": "factors for activations",
}
"""Roles whose values are drawn -> what they are."""

DEFAULT_TOKENS = 1 << 17
"""Most tokens of the slider where config.json does not say how many the model takes."""

PROBLEMS_OF_A_CODE = 50
"""Problems of one code that are listed."""

_COLOURS = 7
"""Colours that the style sheet has for formats."""


def page(checkpoint: Checkpoint, findings: Findings, problems: Sequence[Problem], *, deep: bool) -> str:
    """The page as text.

    Args:
        checkpoint: what it is about.
        findings: its layers and cache scales.
        problems: all of them.
        deep: whether to read all block scales, however large.
    """
    name = (
        checkpoint.name
        if checkpoint.headers_only
        else (checkpoint.file or checkpoint.directory).resolve().name
    )
    style, script = ((ASSETS / file).read_text(encoding="utf-8") for file in ("page.css", "page.js"))
    body = [
        _head(checkpoint, name),
        _tiles(checkpoint, findings, problems),
        _sizes(checkpoint, findings),
        _memory(checkpoint),
        _problems(problems),
        _distributions(checkpoint, findings, deep=deep),
        _layers(findings.layers),
        _plain(checkpoint, findings),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n"
        f"<title>{_text(name)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + f"\n</main>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _text(value: object) -> str:
    """A text from the files, fit for the page."""
    return escape(text.printable(str(value)))


def _section(title: str, content: str, note: str = "") -> str:
    about = f'<p class="note">{note}</p>' if note else ""
    return f"<section>\n<h2>{title}</h2>\n{about}{content}\n</section>"


def _head(checkpoint: Checkpoint, name: str) -> str:
    config = checkpoint.config
    facts = [checkpoint.producer, *checkpoint.architectures]
    if config is not None:
        facts += [config.quant_algo or "no algorithm for weights"]
        if config.kv_cache_quant_algo:
            facts.append(f"KV cache {config.kv_cache_quant_algo}")
    chips = "".join(f"<li>{_text(fact)}</li>" for fact in facts if fact)
    return f'<header>\n<h1>{_text(name)}</h1>\n<ul class="chips">{chips}</ul>\n</header>'


def _tiles(checkpoint: Checkpoint, findings: Findings, problems: Sequence[Problem]) -> str:
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    quantized = sum(layer.size for layer in findings.layers)
    weights = sum(layer.weights for layer in findings.layers)
    counts = Counter(problem.severity for problem in problems)
    worst = next((severity for severity in SEVERITIES if counts[severity]), "good")
    told = ", ".join(text.plural(counts[severity], severity) for severity in SEVERITIES if counts[severity])
    tiles = [
        (text.size(total), f"in {text.plural(len(checkpoint.files.files), 'file')}", ""),
        (_count(weights), f"quantized weights in {text.plural(len(findings.layers), 'layer')}", ""),
        (f"{8 * quantized / weights:.2f}" if weights else "–", "bits for each of them, scales included", ""),
        (text.percent(quantized, total) if total else "–", "of the bytes are quantized", ""),
        (f"{len(problems):,}", f"problems: {told}" if told else "problems", worst),
    ]
    cells = "".join(
        f'<div class="tile {kind}"><strong>{value}</strong><span>{_text(label)}</span></div>'
        for value, label, kind in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _count(number: int) -> str:
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)


def _sizes(checkpoint: Checkpoint, findings: Findings) -> str:
    """A bar of all bytes by format, and what the parts are."""
    sizes: dict[str, int] = defaultdict(int)
    for layer in findings.layers:
        sizes[layer.quant_algo] += layer.size
    order = sorted(sizes, key=lambda algo: -sizes[algo])
    rest: dict[str, int] = defaultdict(int)
    for info in plain.plain_tensors(checkpoint, findings):
        rest[f"not quantized, {info.dtype}"] += info.nbytes
    sizes |= rest
    order += sorted(rest, key=lambda dtype: -rest[dtype])
    total = sum(sizes.values())
    if not total:
        return ""
    bar, legend = [], []
    for number, name in enumerate(order):
        kind = f"c{number % _COLOURS}" if name not in rest else "plain"
        share = 100 * sizes[name] / total
        label = f"{_text(name)}: {text.size(sizes[name])}"
        bar.append(f'<span class="{kind}" style="flex-grow:{share:.4f}" title="{label}"></span>')
        legend.append(
            f'<li><i class="{kind}"></i>{_text(name)} <b>{text.size(sizes[name])}</b> '
            f"<small>{text.percent(sizes[name], total)}</small></li>"
        )
    content = f'<div class="sizes">{"".join(bar)}</div>\n<ul class="legend">{"".join(legend)}</ul>'
    return _section("Sizes", content)


def _memory(checkpoint: Checkpoint) -> str:
    """Weights and cache at several lengths; the slider recomputes one of them."""
    weights = sum(info.nbytes for info in checkpoint.tensors.values())
    config = checkpoint.model_config
    algo = checkpoint.config.kv_cache_quant_algo if checkpoint.config else None
    parts = cache_parts(config, algo)
    if not weights or not parts:
        return ""
    most = _most_tokens(config)
    lengths = sorted({most, *(1 << power for power in (10, 12, 14, 15, 17, 20) if 1 << power < most)})
    rows = "".join(
        f"<tr><td>{length:,}</td><td>{text.size(int(cache_bytes(parts, length)))}</td>"
        f"<td>{text.size(int(weights + cache_bytes(parts, length)))}</td></tr>"
        for length in lengths
    )
    table = (
        '<table class="small"><thead><tr><th>tokens</th><th>KV cache</th><th>with weights</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )
    data = {"weights": weights, "parts": [part._asdict() for part in parts], "most": most}
    slider = (
        f"<form id=\"memory\" hidden data-model='{escape(json.dumps(data))}'>"
        '<label>context <output id="tokens"></output> tokens'
        f'<input id="context" type="range" min="0" max="{max(1, round(16 * log2(most)))}" '
        f'value="{round(16 * log2(most))}"></label>'
        '<label>sequences at once <output id="sequences"></output>'
        '<input id="batch" type="range" min="0" max="10" value="0"></label>'
        '<p class="result"><strong id="total"></strong> <span id="split"></span></p></form>'
    )
    return _section("Memory", f'<div class="columns">{slider}{table}</div>', _memory_note(parts, algo))


def _memory_note(parts: Sequence[CachePart], algo: str | None) -> str:
    layers = sum(part.layers for part in parts)
    each = sum(part.layers * part.token_bytes for part in parts)
    about = (
        f"Weights as stored, and the KV cache of {text.plural(layers, 'attention layer')} by config.json: "
        f"{text.size(round(each))} for each token in {_text(algo or '16 bits')}."
    )
    windows = [part for part in parts if part.window]
    if windows:
        about += f" {windows[0].layers:,} of them keep the last {windows[0].window:,} tokens only."
    return about + " Activations and what an engine needs for itself come on top."


def _most_tokens(config: Mapping[str, Any]) -> int:
    for part in (config, config.get("text_config"), config.get("llm_config")):
        value = part.get("max_position_embeddings") if isinstance(part, Mapping) else None
        if isinstance(value, int) and 1 < value < 2**31:
            return value
    return DEFAULT_TOKENS


def _problems(problems: Sequence[Problem]) -> str:
    if not problems:
        return _section("Problems", '<p class="none">None.</p>')
    by_code: dict[str, list[Problem]] = defaultdict(list)
    for severity in SEVERITIES:
        for problem in problems:
            if problem.severity == severity:
                by_code[problem.code].append(problem)
    blocks = []
    for code, alike in by_code.items():
        items = "".join(
            f"<li>{_where(problem)}{_text(problem.message)}</li>" for problem in alike[:PROBLEMS_OF_A_CODE]
        )
        if len(alike) > PROBLEMS_OF_A_CODE:
            items += f"<li>and {len(alike) - PROBLEMS_OF_A_CODE:,} more</li>"
        is_open = " open" if alike[0].severity == "error" else ""
        blocks.append(
            f'<details class="problem"{is_open}><summary><b class="{alike[0].severity}">'
            f"{alike[0].severity}</b> <code>{_text(code)}</code> <small>{text.times(len(alike))}</small>"
            f"</summary><p>{_text(ADVICE[code])}</p><ul>{items}</ul></details>"
        )
    return _section("Problems", "\n".join(blocks))


def _where(problem: Problem) -> str:
    place = problem.layer or problem.tensor
    return f"<code>{_text(place)}</code> " if place else ""


def _distributions(checkpoint: Checkpoint, findings: Findings, *, deep: bool) -> str:
    """A histogram of each kind of scale in each format, and of the cache's."""
    if checkpoint.headers_only:
        return ""
    large = deep or block_scale_bytes(checkpoint.tensors) <= BLOCK_SCALES_READ
    histograms: dict[tuple[str, str], Histogram] = {}
    unread = 0
    for record in _scaled(findings.layers):
        for role in SCALES:
            tensor = record.tensors.get(role)
            if tensor is None:
                continue
            info = checkpoint.tensors[tensor]
            if info.numel > FEW and not large:
                unread += 1
                continue
            histogram = histograms.setdefault((record.quant_algo, role), Histogram())
            histogram.add(decode_scales(info.dtype, checkpoint.tensor(tensor)))
    for kv in findings.kv:
        for role, tensor in kv.tensors.items():
            if role.endswith("scale"):
                histogram = histograms.setdefault(("KV cache", role), Histogram())
                histogram.add(decode_scales(checkpoint.tensors[tensor].dtype, checkpoint.tensor(tensor)))
    figures = "".join(
        f"<figure><figcaption><b>{_text(algo)}</b> {SCALES.get(role, role)}</figcaption>{histogram.svg()}"
        f"<small>{_told(histogram)}</small></figure>"
        for (algo, role), histogram in histograms.items()
    )
    if not figures:
        return ""
    note = "How many scales have which value, on a logarithmic axis."
    if unread:
        note += f" Block scales of {text.plural(unread, 'layer')} were not read; --deep reads them."
    return _section("Scales", f'<div class="figures">{figures}</div>', note)


def _scaled(layers: Iterable[LayerRecord]) -> Iterable[LayerRecord | Projection]:
    for layer in layers:
        yield from layer.projections or layer.linears()


def _told(histogram: Histogram) -> str:
    parts = [text.plural(histogram.total, "value")]
    if histogram.zeros:
        parts.append(f"{histogram.zeros:,} zero")
    if histogram.odd:
        parts.append(f"{histogram.odd:,} negative or not finite")
    return ", ".join(parts)


_COLUMNS = ("layer", "kind", "format", "shape", "weights", "size", "bits", "problems")


def _layers(layers: Sequence[LayerRecord]) -> str:
    if not layers:
        return ""
    rows = []
    for place, layer in enumerate(sorted(layers, key=lambda layer: number_order(layer.name))):
        shape = " × ".join(map(str, layer.shape))
        bits = 8 * layer.size / layer.weights if layer.weights else 0.0
        problems = list(layer.all_problems())
        worst = next((s for s in SEVERITIES if any(p.severity == s for p in problems)), "")
        cells: list[tuple[object, str]] = [
            (place, f"<code>{_text(layer.name)}</code>"),
            (layer.kind, layer.kind),
            (layer.stored_form, _text(layer.stored_form)),
            (layer.weights, shape),
            (layer.weights, _count(layer.weights)),
            (layer.size, text.size(layer.size)),
            (bits, f"{bits:.2f}" if bits else ""),
            (len(problems), f'<b class="{worst}">{len(problems)}</b>' if problems else ""),
        ]
        tds = "".join(f'<td data-v="{_text(value)}">{shown}</td>' for value, shown in cells)
        rows.append(f"<tr>{tds}</tr>")
    head = "".join(f'<th scope="col"><button type="button">{name}</button></th>' for name in _COLUMNS)
    table = (
        f'<div class="wide"><table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
    )
    search = '<input id="filter" type="search" placeholder="filter by name or format" hidden>'
    return _section(f"Layers <small>{len(layers):,}</small>", search + table)


def _plain(checkpoint: Checkpoint, findings: Findings) -> str:
    tensors = plain.plain_tensors(checkpoint, findings)
    if not tensors:
        return ""
    rows = "".join(
        f"<tr><td><code>{_text(info.name)}</code></td><td>{_text(info.dtype)}</td>"
        f"<td>{' × '.join(map(str, info.shape)) or '1'}</td><td>{text.size(tensor_bytes(info))}</td></tr>"
        for info in sorted(tensors, key=lambda info: -info.nbytes)
    )
    table = (
        '<div class="wide"><table class="tensors"><thead><tr><th>tensor</th><th>type</th><th>shape</th>'
        f"<th>size</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )
    title = f"Not quantized <small>{len(tensors):,}</small>"
    return f"<section>\n<details><summary><h2>{title}</h2></summary>\n{table}\n</details>\n</section>"
