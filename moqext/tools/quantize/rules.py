"""Which linears get codes, and of which algorithm: rules, exclusions, and what ModelOpt leaves as it is."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from moqext import _C
from moqext.algorithms import ALGORITHMS
from moqext.ops.quantize_weights import WRITTEN
from moqext.reader.config.model_config import layer_count
from moqext.reader.naming import (
    PROJECTIONS,
    is_never_quantized,
    is_number,
    is_vision,
    parse_expert_name,
)

LEFT_OUT = (
    "*block_sparse_moe.gate*",
    "*embed_vision*",
    "*linear_attn.in_proj_a*",
    "*linear_attn.in_proj_b*",
    "*lm_head*",
    "*mlp.gate.*",
    "*mlp.shared_expert_gate.*",
    "*multi_modal_projector*",
    "*output_layer*",
    "*proj_out.*",
    "*router*",
    "*vision_model*",
    "*vision_tower*",
    "*visual*",
    "mtp.*",
    "output.*",
)
"""Names of linears, each with a dot at its end, that ModelOpt 0.47 leaves out unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One choice: linears whose names fit a pattern get an algorithm.

    Attributes:
        pattern: of whole names; `*` stands for any characters, dots included, and nothing else is special.
        quant_algo: canonical; None leaves them as they are.
    """

    pattern: str
    quant_algo: str | None

    def fits(self, module: str) -> bool:
        """Whether the rule is for a module."""
        return _C.glob_match(self.pattern, module)


def algorithm(name: str, argument: str) -> str:
    """The canonical name of an algorithm that is written.

    Raises:
        ValueError: it is none of them; the message begins with the argument.
    """
    known = {
        spelling.upper(): canonical
        for canonical in WRITTEN
        for spelling in (canonical, *ALGORITHMS[canonical].aliases)
    }
    if name.upper() not in known:
        raise ValueError(f"{argument}: expected one of {', '.join(WRITTEN)}, got {name!r}")
    return known[name.upper()]


def parse_rule(text: str | tuple[str, str]) -> Rule:
    """A rule from "GLOB ALGORITHM", or a pair of the two; the algorithm "none" leaves linears as they are.

    Raises:
        ValueError: it is neither.
    """
    parts = text.split() if isinstance(text, str) else list(text)
    if len(parts) != 2:
        raise ValueError(f'rule: expected a pattern and an algorithm, as "*.mlp.* NVFP4", got {text!r}')
    pattern, algo = parts
    return Rule(pattern, None if algo.lower() == "none" else algorithm(algo, "rule"))


class Selection:
    """The algorithms of linears, by their names.

    Args:
        to: the algorithm of linears that no rule is for; None leaves them as they are.
        rules: the last that fits decides. A pattern without `*` also reaches what is left out by default.
        exclude: patterns of linears that stay as they are, whatever the rules say.
        model: what config.json holds.
    """

    def __init__(
        self, to: str | None, rules: Sequence[Rule], exclude: Sequence[str], model: Mapping[str, Any]
    ) -> None:
        self._to = to
        self._rules = tuple(rules)
        self._exclude = tuple(exclude)
        self._layers = layer_count(model)
        self._used: set[str] = set()

    def quant_algo(self, module: str) -> str | None:
        """The algorithm of a linear, None where it stays as it is."""
        chosen, named = self._to, False
        for rule in self._rules:
            if rule.fits(module):
                self._used.add(rule.pattern)
                chosen, named = rule.quant_algo, "*" not in rule.pattern
        for pattern in self._exclude:
            if _C.glob_match(pattern, module) or module.startswith(f"{pattern}."):
                self._used.add(pattern)
                chosen = None
        return None if not named and self._is_left_out(module) else chosen

    def unused(self) -> list[str]:
        """Patterns that fitted no linear that `quant_algo` was asked about."""
        patterns = [*(rule.pattern for rule in self._rules), *self._exclude]
        return [pattern for pattern in dict.fromkeys(patterns) if pattern not in self._used]

    def _is_left_out(self, module: str) -> bool:
        if any(_C.glob_match(pattern, f"{module}.") for pattern in LEFT_OUT) or is_vision(module):
            return True
        if self._is_beyond(module):
            return True
        expert = parse_expert_name(module)
        return (expert is None or expert.projection not in PROJECTIONS) and is_never_quantized(module)

    def _is_beyond(self, module: str) -> bool:
        """Whether it is in a layer after the last, as those for speculative decoding are."""
        parts = module.split(".")
        numbers = (int(n) for name, n in pairwise(parts) if name == "layers" and is_number(n))
        first = next(numbers, None)
        return first is not None and self._layers is not None and first >= self._layers


def summarize(plain: Sequence[str], quantized: Sequence[str]) -> list[str]:
    """Entries of an exclusion list that cover the plain modules and no quantized one, as ModelOpt's.

    Of each name the shortest beginning at a dot counts with which no quantized name begins: `p*`, or `p.*`
    where others begin with p and no dot. Else the name itself stands.
    """
    begun = sorted(quantized)
    return sorted({_entry(name, begun) for name in plain})


def _entry(name: str, quantized: Sequence[str]) -> str:
    for at, letter in enumerate(name):
        if letter != ".":
            continue
        if not _begins_any(name[:at], quantized):
            return f"{name[:at]}*"
        if not _begins_any(f"{name[:at]}.", quantized):
            return f"{name[:at]}.*"
    return name


def _begins_any(beginning: str, names: Sequence[str]) -> bool:
    """Whether one of some sorted names has the beginning."""
    at = bisect_left(names, beginning)
    return at < len(names) and names[at].startswith(beginning)
