"""How many experts a container must hold, and how wide they are, by config.json and other layers.

Experts that are gone from the end leave no hole in the numbers of the others. config.json counts them; where
it does not, the rows of the router do, and last the containers of other layers.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from moqext.reader.config.model_config import expert_counts, expert_widths
from moqext.reader.naming import PROJECTIONS, name_pattern, parse_expert_name
from moqext.reader.problems import Problem, make_problem

ROUTERS = ("gate", "router", "router.proj", "gate.wg", "router.layer")
"""Names of routers beside a container of experts."""


class ExpertCounts:
    """The numbers of experts that containers hold and must hold.

    Args:
        shapes: module -> shape of its weight, of all modules.
        rows: module -> rows of its weight, of unquantized ones.
        model: what config.json holds.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], rows: Mapping[str, int], model: Mapping[str, Any]
    ) -> None:
        self._rows = rows
        self._counts = expert_counts(model)
        self._widths = expert_widths(model)
        self.present = _present(shapes)
        self._usual: dict[str, int] = defaultdict(int)
        for container, count in self.present.items():
            pattern = name_pattern(container)
            self._usual[pattern] = max(count, self._usual[pattern])

    def expected(self, container: str) -> int:
        """The number of experts the container must hold, at least as many as it does."""
        present = self.present.get(container, 0)
        if self._counts:
            larger = [count for count in self._counts if count > present]
            return min(larger) if larger and present not in self._counts else present
        outer = container.rpartition(".")[0]
        routers = (f"{outer}.{name}" if outer else name for name in ROUTERS)
        rows = next((self._rows[name] for name in routers if name in self._rows), None)
        return max(present, self._usual[name_pattern(container)] if rows is None else rows)

    def check_stack(self, container: str) -> Iterator[Problem]:
        """The problem of experts stacked in one tensor, or all unquantized, of which some are gone."""
        present, expected = self.present.get(container, 0), self.expected(container)
        if present < expected:
            message = (
                f"{expected - present} of {expected} experts are missing: the last is number {present - 1}"
            )
            yield make_problem("missing_expert", message, layer=container)

    def check_width(self, container: str, width: int) -> Iterator[Problem]:
        """The problem of experts of a width that config.json does not name."""
        if self._widths and width and width not in self._widths:
            named = ", ".join(map(str, sorted(self._widths)[:4]))
            message = f"experts are {width} wide, config.json names {named}"
            yield make_problem("shape_mismatch", message, layer=container)


def _present(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The last expert's number and one, or the extent of stacks, by container."""
    present: dict[str, int] = defaultdict(int)
    for module, shape in shapes.items():
        if expert := parse_expert_name(module):
            present[expert.container] = max(present[expert.container], expert.expert + 1)
        elif len(shape) == 3:
            container, _, last = module.rpartition(".")
            if last in PROJECTIONS and container.endswith(("experts", "moe")):
                present[container] = max(present[container], shape[0])
    return present
