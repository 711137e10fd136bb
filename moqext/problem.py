"""What a reader has to say about a checkpoint it could open: one record per finding."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding.

    Attributes:
        code: stable identifier in lower case with underscores, meant for programs.
        severity: "error" (running would be wrong), "warning" (may be wrong), "note" (worth knowing).
        layer: the module it concerns, None when it is not about one.
        tensor: the tensor it concerns, None when it is not about one.
        message: what was found and what was expected, meant for people.
    """

    code: str
    severity: Severity
    layer: str | None
    tensor: str | None
    message: str
