"""Bounds that hold on a busy machine, and many small cases as one test."""

import functools
import inspect
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

HANGS = 900
"""Seconds after which a process is taken to hang: many times what any test takes on a busy machine."""

ROUNDS = 20


def assert_growth(make: Callable[[int], Callable[[], object]], small: int, large: int, most: float) -> None:
    """Checks that work on `large` takes at most `most` times the work on `small`.

    Processor time of this thread stands for work. Sizes take turns, and the least time of each counts.
    The first round that shows the growth ends the test.

    Args:
        make: From a size to what does the work, whose own preparation is not counted.
        small: A size whose work takes a millisecond or more.
        large: Another size.
        most: Bound on the growth, between that of good code and that of bad code.
    """
    works = {size: make(size) for size in (small, large)}
    least = dict.fromkeys(works, float("inf"))
    for _ in range(ROUNDS):
        for size, work in works.items():
            begin = time.thread_time()
            work()
            least[size] = min(least[size], time.thread_time() - begin)
        if least[large] <= most * least[small]:
            return
    raise AssertionError(f"{least[large] / least[small]:.1f} times the work from {small} to {large}")


def assert_linear(make: Callable[[int], Callable[[], object]], small: int) -> None:
    """Checks that work on 16 times the size takes about 16 times the work, not 256 times."""
    assert_growth(make, small, 16 * small, 64)


def each(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes one test of a function that checks one case: it runs them all and shows those that fail.

    Cases that take microseconds are not worth a test each. Fixtures are made once, for all of them.

    Args:
        names: Parameters of the function that a case is for, as for `pytest.mark.parametrize`.
        cases: Their values; tuples where there are several names.
    """
    keys = [name.strip() for name in names.split(",")]
    values = [case if len(keys) > 1 else (case,) for case in cases]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*self: Any, **fixtures: Any) -> None:
            failed: list[BaseException] = []
            for case in values:
                try:
                    test(*self, **dict(zip(keys, case, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"the case {case!r}")
                    failed.append(error)
            if failed:
                raise BaseExceptionGroup(f"{len(failed)} of {len(values)} cases failed", failed)

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate
