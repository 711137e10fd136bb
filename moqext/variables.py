"""Says once what is wrong with the variables of the environment that moqext reads."""

import warnings

from moqext import _C

_said: set[str] = set()


def check_variables(stacklevel: int) -> None:
    """Warns of values that mean nothing and names that nothing reads, of each once in a process.

    MOQEXT_KERNEL is not among them: with a wrong one no layer can be made.

    Raises:
        RuntimeWarning: where the program has made errors of warnings.
    """
    for text in _C.check_variables():
        if text not in _said:
            _said.add(text)
            warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
