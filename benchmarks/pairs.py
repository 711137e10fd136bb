"""Every measured call of moqext beside the fastest other path: what pages and tables are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import goals, layers, record
from benchmarks.moe_layers import UNIFORM
from benchmarks.moe_peers import ORDINARY, OWN
from benchmarks.neighbour_chain import NEIGHBOURS
from benchmarks.neighbours import ALL, ALONE, DEFAULT, KNOWING
from moqext.cli.text import duration
from moqext.tools.bench import PEER

PUBLISHED_EXPERTS = Path(__file__).parent / "published_moe_h200.json"
PUBLISHED_CHIP = "h200"

LLAMA, QWEN = "Llama 8B", "Qwen3-30B-A3B"
TORCH = "torch bfloat16"
ANY = "fastest other"
PUBLIC = "public kernels"
MARLIN = "Marlin and Humming, published"
CHOSEN = "chosen by tokens"
GGML = "llama.cpp"
GGML_ALGO = "NVFP4 of llama.cpp"

Row = Mapping[str, Any]


class Pair(NamedTuple):
    """A call of moqext and another of the same work.

    Attributes:
        chip: The machine, as the file of the result names it.
        algo: The format, and how it is multiplied.
        case: The layer or the model.
        tokens: Rows of x, or sequences.
        beside: The kind of path that the other one is of.
        own: Seconds of moqext: of a call, or of a token where `rate`.
        other: Seconds of the other.
        peer: Whose it is.
        file: The result that has it.
        rate: Whether tokens a second are shown.
        goals: What is asked of moqext, and whether it is met.
        plain: Seconds of moqext without programmatic launch, None where that was not measured.
    """

    chip: str
    algo: str
    case: str
    tokens: int
    beside: str
    own: float
    other: float
    peer: str
    file: str
    rate: bool = False
    goals: Sequence[tuple[str, bool]] = ()
    plain: float | None = None

    @property
    def ratio(self) -> float:
        """How many times as fast as the other; more than 1 is faster."""
        return self.other / self.own

    def shown(self, seconds: float) -> str:
        """A time of the two as text."""
        if not self.rate:
            return duration(seconds)
        return f"{1 / seconds:,.{0 if seconds < 0.01 else 1}f} tokens/s"

    def line(self) -> list[str]:
        """Everything as texts, for a table."""
        missed = ", ".join(name for name, met in self.goals if not met)
        about = [self.chip, self.algo, self.case, str(self.tokens)]
        times = [self.shown(seconds) if seconds else "" for seconds in (self.own, self.plain, self.other)]
        return [*about, *times, self.peer, f"{self.ratio:.2f}", missed]


def linears(benchmark: str, algos: Callable[[str], bool]) -> list[Pair]:
    """FP8 or NVFP4 linears on CUDA, beside paths of the run and published figures of the same chip."""
    pairs = []
    for chip, result in record.read_all(benchmark).items():
        published = goals.read_published() if chip == PUBLISHED_CHIP else {}
        for cell in goals.cells(result["rows"], published):
            (shape, tokens, algo), own = cell.key, cell.own
            if own is None or not algos(algo):
                continue
            others = [(row["seconds"], row["peer"], ANY) for row in cell.peers[:1]]
            if cell.published:
                others.append((cell.published.seconds, f"{cell.published.peer}, published", ANY))
            others = others and [min(others)]
            if cell.bfloat16 and not algo.endswith(goals.FAST):
                others.append((cell.bfloat16["seconds"], PEER, TORCH))
            if cell.published and algo in layers.NVFP4_ALGOS and algo != layers.NVFP4_FP8:
                others.append((cell.published.seconds, cell.published.peer, MARLIN))
            asked = [(goal.name, goal.met) for goal in goals.goals(cell)]
            about = (chip, algo, f"{shape[0]} × {shape[1]}", tokens)
            for seconds, peer, beside in others:
                pair = Pair(*about, beside, own["seconds"], seconds, peer, f"{benchmark}.{chip}")
                if beside == ANY:
                    plain = cell.without["seconds"] if cell.without else None
                    pair = pair._replace(goals=asked, plain=plain)
                pairs.append(pair)
    return pairs


def published_experts() -> dict[tuple[str, int, str], tuple[float, str]]:
    """The fastest published layer by model, tokens and format: seconds, and whose."""
    found: dict[tuple[str, int, str], tuple[float, str]] = {}
    for model, tokens, algo, peer, microseconds in json.loads(PUBLISHED_EXPERTS.read_text())["cells"]:
        seen = (microseconds * 1e-6, f"{peer}, published")
        found[model, tokens, algo] = min(found.get((model, tokens, algo), seen), seen)
    return found


def experts() -> list[Pair]:
    """Layers of experts on CUDA, tokens routed at random, beside torch and public kernels."""
    pairs = []
    beside = record.read_all("moe_peers")
    for chip, result in record.read_all("moe_cuda").items():
        rows = [
            row
            for row in result["rows"]
            if (row["neighbours"], row["routing"], row["policy"]) == (ALONE, UNIFORM, ALL)
        ]
        torch = {(row["model"], row["tokens"]): row["seconds"] for row in rows if row["quant_algo"] == PEER}
        for row in rows:
            key = (row["model"], row["tokens"])
            if row["quant_algo"] == PEER or key not in torch:
                continue
            limit = goals.experts_limit(row["quant_algo"], row["tokens"], row["floor_seconds"], row["flop"])
            asked = [("time", row["seconds"] <= limit)] if limit else []
            about = (chip, row["quant_algo"], *key, TORCH, row["seconds"], torch[key])
            pairs.append(Pair(*about, "torch grouped_mm", f"moe_cuda.{chip}", goals=asked))
        if chip in beside:
            pairs += _public_experts(chip, beside[chip]["rows"])
    return pairs


def _public_experts(chip: str, rows: Sequence[Row]) -> Iterator[Pair]:
    """Layers beside public kernels of the same process, and published ones where these are faster."""
    others = published_experts() if chip == PUBLISHED_CHIP else {}
    for row in rows:
        if row["peer"] not in (OWN, ORDINARY):
            key = (row["model"], row["tokens"], row["quant_algo"])
            seen = (row["seconds"], row["peer"])
            others[key] = min(others.get(key, seen), seen)
    found = {(row["model"], row["tokens"], row["quant_algo"], row["peer"]): row["seconds"] for row in rows}
    for (model, tokens, algo, who), seconds in found.items():
        other = others.get((model, tokens, layers.NVFP4 if algo == layers.NVFP4_FP8 else algo))
        if other and who == OWN:
            plain = found.get((model, tokens, algo, ORDINARY))
            about = (chip, algo, model, tokens, PUBLIC, seconds, *other, f"moe_peers.{chip}")
            yield Pair(*about, plain=plain)


def cpu_linears() -> list[Pair]:
    """Linears on the CPU, beside torch, and of NVFP4 beside llama.cpp."""
    return [*_on_the_cpu("linear_cpu", ("shape", "tokens")), *_on_the_cpu("ggml_cpu", ("shape", "tokens"))]


def cpu_experts() -> list[Pair]:
    """A layer of experts on the CPU, beside torch and llama.cpp."""
    return list(_on_the_cpu("moe_cpu", ("tokens",)))


def _on_the_cpu(benchmark: str, keys: Sequence[str]) -> Iterator[Pair]:
    for chip, result in record.read_all(benchmark).items():
        found = {(row["quant_algo"], *(str(row[key]) for key in keys)): row for row in result["rows"]}
        for (algo, *key), row in found.items():
            if algo in (PEER, GGML_ALGO):
                continue
            case = " × ".join(map(str, row.get("shape", [QWEN])))
            for peer, beside in ((PEER, TORCH), (GGML_ALGO, GGML)):
                other = found.get((peer, *key))
                if other is None or (beside == GGML and "NVFP4" not in algo):
                    continue
                goal = row.get("goal") if beside == TORCH else None
                asked = [(f"{goal}×", row["torch_ratio"] >= goal)] if goal else []
                about = (chip, algo, case, row["tokens"], beside, row["seconds"], other["seconds"], peer)
                yield Pair(*about, f"{benchmark}.{chip}", goals=asked)


def neighbours() -> list[Pair]:
    """Seconds that the linears of a layer add to the kernels between them, beside torch's linears."""
    pairs = []
    for chip, result in record.read_all("neighbours").items():
        names = ("chain", "tokens", "neighbours", "quant_algo", "policy")
        times = {
            tuple(row[name] for name in names): row["seconds"]
            for row in result["rows"]
            if row["without"] is None and row["forced"] is None and row["neighbours"] in NEIGHBOURS
        }
        for *place, algo in dict.fromkeys(key[:-1] for key in times):
            own, other = _added(times, *place, algo), _added(times, *place, PEER)
            if algo not in (None, PEER) and own is not None and other is not None:
                chain, tokens, kind = place
                about = (chip, algo, f"{chain}, {kind}'s kernels between", tokens, TORCH)
                pairs.append(Pair(*about, own, other, PEER, f"neighbours.{chip}"))
    return pairs


def _added(times: Mapping[Any, float], *case: Any) -> float | None:
    """Seconds less those of the kernels alone, which are torch's by any policy where none is by the same."""
    *place, _ = case
    for policy in (DEFAULT, KNOWING, ALL):
        whole = times.get((*case, policy))
        least = times.get((*place, None, policy), times.get((*place, None, ALL)))
        if whole is not None and least is not None:
            return whole - least
    return None


MODELS = {"llama": (LLAMA, "modules"), "moe_model": (QWEN, "grouped_mm", "batched_mm")}
"""Models and their forms in bfloat16, by the name of their results."""


def models() -> list[Pair]:
    """Whole models in Transformers, beside bfloat16 there."""
    pairs = []
    for benchmark, (model, *plain) in MODELS.items():
        for chip, result in record.read_all(benchmark).items():
            for row in result["rows"]:
                if row["weights"] == PEER or row["form"] not in ("modules", "transformers"):
                    continue
                others = [
                    (1 / other["tokens_per_second"], f"Transformers, {other['form']}")
                    for other in result["rows"]
                    if (other["weights"], other["tokens"], other.get("what"))
                    == (PEER, row["tokens"], row.get("what"))
                    and other["form"] in plain
                ]
                algo = row["weights"] + (", auto" if row.get("compute") == "auto" else "")
                case = f"{model}, {'as loaded' if row['form'] == 'transformers' else 'linears alone'}"
                if others:
                    about = (chip, algo, case, row["tokens"], "Transformers, bfloat16")
                    own = 1 / row["tokens_per_second"]
                    pairs.append(Pair(*about, own, *min(others), f"{benchmark}.{chip}", rate=True))
    return pairs


def invariant() -> list[Pair]:
    """Layers whose rows depend on no other, beside those that choose for each number of tokens."""
    pairs = []
    for chip, result in record.read_all("batch_invariance").items():
        names = ("quant_algo", "case", "tokens")
        times = {(row["batch_invariant"], *(row[name] for name in names)): row for row in result["rows"]}
        for (fixed, *about), row in times.items():
            if fixed:
                usual = times[(False, *about)]
                beside = (CHOSEN, row["seconds"], usual["seconds"], usual["kernel"])
                pairs.append(Pair(chip, *about, *beside, f"batch_invariance.{chip}"))
    return pairs


ENGINE = {
    "vllm": LLAMA,
    "vllm-64": f"{LLAMA}, engines in turn",
    "vllm-busy": f"{LLAMA}, engines in turn",
    "vllm-compressed": f"{LLAMA} of compressed-tensors",
    "vllm-experts": QWEN,
    "vllm-experts-busy": f"{QWEN}, engines in turn",
    "vllm-two": f"{LLAMA}, two GPUs",
    "vllm-experts-two": f"{QWEN}, two GPUs",
    "vllm-experts-parallel": f"{QWEN}, two GPUs, expert parallel",
}
"""Models by the name of their results."""


def vllm() -> list[Pair]:
    """Models in vLLM, beside the fastest of its own kernels for the format."""
    pairs = []
    for benchmark, model in ENGINE.items():
        for chip, result in record.read_all(benchmark).items():
            runs: dict[tuple[str, bool, bool], dict[str, list[dict[int, float]]]] = {}
            for row in result["rows"]:
                algo, _, who = row["name"].removeprefix("experts in ").partition(" ")
                if who == "moqext auto":
                    algo, who = f"{algo}, auto", "moqext"
                key = (algo, row["compile"], who == "moqext")
                if "," not in who and who:
                    runs.setdefault(key, {}).setdefault(who, []).append(_seconds_of(row))
            for (algo, compiled, own), engines in runs.items():
                others = runs.get((algo.removesuffix(", auto"), compiled, False))
                if not own or not others:
                    continue
                for turn, times in enumerate(engines["moqext"]):
                    case = model + (", torch.compile" if compiled else ", graphs")
                    for tokens, seconds in times.items():
                        found = min((_turn(each, turn)[tokens], who) for who, each in others.items())
                        peer = f"vLLM, {found[1].removeprefix('vLLM') or 'its own'}"
                        about = (chip, algo, case, tokens, "vLLM's kernels", seconds, found[0], peer)
                        pairs.append(Pair(*about, f"{benchmark}.{chip}", rate=True))
    return pairs


def _turn(measured: Sequence[dict[int, float]], turn: int) -> dict[int, float]:
    return measured[min(turn, len(measured) - 1)]


def _seconds_of(row: Row) -> dict[int, float]:
    """Seconds a token by sequences, and of a token of the prompt by its tokens."""
    found = {int(count): 1 / speed for count, speed in row["decode"].items()}
    return found | ({4096: 1 / row["prefill"]} if row["prefill"] else {})


RANGES = ((1, 1), (2, 16), (17, 64), (65, 1023), (1024, 1 << 40))
"""Tokens whose cells are summed up together."""


def range_of(tokens: int) -> tuple[int, int]:
    """The range of `RANGES` that has so many tokens."""
    return next(each for each in RANGES if each[0] <= tokens <= each[1])
