"""Writes the tables of docs/results/neighbours.md from benchmarks/results/neighbours.*.json.

python -m benchmarks.neighbours_page
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cpu_page import fill
from benchmarks.cuda_page import PAGES, lines
from benchmarks.neighbour_chain import OWN, TORCH
from benchmarks.neighbours import ALL, ALONE, DEFAULT, KNOWING, NONE, OFF, SINGLE
from benchmarks.record import RESULTS
from moqext.tools.bench import PEER

PAGE = PAGES / "neighbours.md"
MARKS = ("<!-- results: python -m benchmarks.neighbours_page -->", "<!-- end of results -->")
POLICIES = (ALL, KNOWING, NONE, OFF, DEFAULT)

Row = Mapping[str, Any]


class Times:
    """Microseconds of a layer by what was timed.

    Args:
        rows: Of a result.
        forced: Only those with this kernel forced, None for those with none.
    """

    def __init__(self, rows: Sequence[Row], forced: str | None = None) -> None:
        self.rows = [row for row in rows if row["forced"] == forced]
        names = ("chain", "tokens", "quant_algo", "neighbours", "policy", "without")
        self._times = {tuple(row[name] for name in names): row["seconds"] * 1e6 for row in self.rows}

    @property
    def policies(self) -> list[str]:
        """Those of `POLICIES` that were measured."""
        return [policy for policy in POLICIES if any(row["policy"] == policy for row in self.rows)]

    def layer(self, chain: str, tokens: int, algo: str | None, neighbours: str, policy: str) -> float | None:
        """A layer with all its linears; with none where `algo` is None."""
        return self._times.get((chain, tokens, algo, neighbours, policy, None))

    def added(self, chain: str, tokens: int, algo: str | None, neighbours: str, policy: str) -> float | None:
        """What the linears add to the kernels between them, which are launched by the same policy."""
        whole = self.layer(chain, tokens, algo, neighbours, policy)
        least = self.layer(chain, tokens, None, neighbours, policy)
        if least is None and neighbours == TORCH:  # torch's are launched alike by every policy of a process
            least = self.layer(chain, tokens, None, neighbours, ALL)
        return None if whole is None or least is None else whole - least

    def added_by(self, chain: str, tokens: int, algo: str, policy: str, role: str) -> float | None:
        """What one linear adds among torch's kernels."""
        whole = self.layer(chain, tokens, algo, TORCH, policy)
        least = self._times.get((chain, tokens, algo, TORCH, policy, role))
        return None if whole is None or least is None else whole - least

    def cells(self) -> list[tuple[str, int, str | None]]:
        """(chain, tokens, algorithm or None for no linears), each once."""
        found = ((row["chain"], row["tokens"], row["quant_algo"]) for row in self.rows)
        return list(dict.fromkeys(found))


def number(value: float | None, sign: str = "") -> str:
    """With two places; nothing for None."""
    return "" if value is None else f"{value:{sign}.2f}"


def called(algo: str | None) -> str:
    """Of a line or column."""
    if algo is None:
        return "none"
    return "torch bfloat16" if algo == PEER else f"`{algo}`"


def layers_table(times: Times, policies: Sequence[str]) -> str:
    """A layer of each chain: linears by themselves, among torch's kernels and among moqext's."""
    head = ["chain", "linears", "tokens", *(f"alone, {policy}" for policy in policies if policy != KNOWING)]
    head += [f"{neighbours}, {policy}" for neighbours in (TORCH, OWN) for policy in policies]
    body = []
    for chain, tokens, algo in times.cells():
        line = [chain, called(algo), str(tokens)]
        for policy in policies:
            if policy != KNOWING:
                line.append(number(times.layer(chain, tokens, algo, ALONE, policy)))
        for neighbours in (TORCH, OWN):
            for policy in policies:
                whole = times.layer(chain, tokens, algo, neighbours, policy)
                added = times.added(chain, tokens, algo, neighbours, policy)
                line.append(
                    number(whole) + (f" ({number(added, '+')})" if algo and added is not None else "")
                )
        body.append(line)
    return lines(head, body, 2)


def roles_table(times: Times, checks: Sequence[Row]) -> str:
    """What each linear of a layer adds among torch's kernels, and the kernel that does it."""
    kernels = {
        (check["chain"], check["tokens"], check["quant_algo"], check["role"]): check["kernel"]
        for check in checks
        if not check["forced"]
    }
    body = []
    for (chain, tokens, algo, role), kernel in kernels.items():
        found = [number(times.added_by(chain, tokens, algo, policy, role)) for policy in times.policies]
        if any(found):
            body.append([role, called(algo), kernel.removeprefix("cuda:"), str(tokens), *found])
    return lines(["linear", "weights", "kernel", "tokens", *times.policies], body, 3)


def single_table(times: Times) -> str:
    """What a layer gains or loses where one kernel of it alone is launched programmatically."""
    cells = [cell for cell in times.cells() if times.layer(*cell, *next(iter(SINGLE))) is not None]
    body = []
    for neighbours, policy in [*((each, ALL) for each in (TORCH, OWN)), *SINGLE]:
        line = [neighbours, policy.removeprefix("only ")]
        for cell in cells:
            one, none = times.layer(*cell, neighbours, policy), times.layer(*cell, neighbours, NONE)
            line.append("" if one is None or none is None else number(one - none, "+"))
        body.append(line)
    return lines(["neighbours", "programmatic", *(called(algo) for _, _, algo in cells)], body, 2)


def profile_table(profile: Sequence[Row]) -> str:
    """Each kernel of a layer among torch's, and the gap before it."""
    sections = []
    for algo in dict.fromkeys(row["quant_algo"] for row in profile if row["quant_algo"] not in (None, PEER)):
        seen = {
            row["policy"]: row["kernels"]
            for row in profile
            if (row["quant_algo"], row["neighbours"]) == (algo, TORCH)
        }
        head = [called(algo), *(f"{policy}, {what}" for policy in (ALL, NONE) for what in ("gap", "time"))]
        body = [
            [
                f"`{short(pair[0]['kernel'])}`",
                *(number(each[what]) for each in pair for what in ("gap_us", "us")),
            ]
            for pair in zip(seen[ALL], seen[NONE], strict=True)
        ]
        sections.append(lines(head, body, 1))
    return "\n\n".join(sections)


def short(kernel: str) -> str:
    """The name of a kernel without types and name spaces."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return name.split("<")[0].split("(")[0].rpartition("::")[2]


def section(result: Mapping[str, Any]) -> str:
    """All tables of a chip."""
    about, times = result["environment"], Times(result["rows"])
    worst = max(check["error"] for check in result["checks"])
    facts = (
        f"torch {about['torch']}, driver {about['driver']}, {about['date'][:10]}. "
        f"{len(result['checks'])} outputs compared with float64, the largest relative error {worst:.1e}."
    )
    parts = [
        f"### {about['gpu']}",
        facts,
        "A layer, µs, and in brackets what its linears add:",
        layers_table(times, times.policies),
        "What one linear adds among torch's kernels, µs:",
        roles_table(times, result["checks"]),
    ]
    if any(row["policy"] == policy for row in result["rows"] for _, policy in SINGLE):
        parts += [
            'One token, "llama": a layer with one kernel launched programmatically beside one with none, µs:',
            single_table(times),
        ]
    for forced in dict.fromkeys(row["forced"] for row in result["rows"] if row["forced"]):
        parts += [
            f"The same with `MOQEXT_KERNEL={forced}`, a layer, µs:",
            layers_table(Times(result["rows"], forced), (ALL, KNOWING, NONE)),
        ]
    if result["profile"]:
        parts += ["What torch's profiler sees of a layer of one token, µs:", profile_table(result["profile"])]
    return "\n\n".join(parts)


def page_text() -> str:
    """The page as the recorded results make it."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("neighbours.*.json"))]
    return fill(PAGE.read_text(encoding="utf-8"), *MARKS, [section(result) for result in results])


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
