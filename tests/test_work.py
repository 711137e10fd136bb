"""Tools of the tests: the bound on growth, and many cases as one test."""

import pytest

from .work import assert_linear, each


def test_growth_is_told():
    assert_linear(lambda size: lambda: sum(range(20 * size)), 1000)
    with pytest.raises(AssertionError, match="times the work from 60 to 960"):
        assert_linear(lambda size: lambda: [sum(range(size)) for _ in range(size)], 60)


def test_every_case_that_fails_is_shown():
    @each("a, b", [(1, 1), (1, 2), (3, 3), (4, 5)])
    def check(a, b, fixture):
        assert a == b, fixture

    with pytest.raises(ExceptionGroup, match="2 of 4 cases failed") as caught:
        check(fixture="given")
    assert [error.__notes__ for error in caught.value.exceptions] == [
        ["the case (1, 2)"],
        ["the case (4, 5)"],
    ]


@each("case", [1, 2])
def test_fixtures_are_those_that_are_left(case, rng):
    assert rng.random() < case
