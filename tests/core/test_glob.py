"""Glob patterns: equality with fnmatch, the star-only rules, and no pattern that takes long."""

import fnmatch
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moqext import _C

from ..work import each

# Few characters, so that patterns and names meet; every special one, and two beyond ASCII.
PATTERNS = st.text(alphabet="ab.*?[]!-^\\é\n", max_size=14)
NAMES = st.text(alphabet="ab.-!]^[é\n𝄞", max_size=10)


@given(PATTERNS, NAMES)
@example("[]-a]", "_")
@example("[!]a-]", "-")
@example("[b-a]", "b")  # a reversed range matches nothing
@example("[!b-a]", "b")  # and, negated, everything
@example("[b-a!x]", "x")  # CPython rewrites the set first, so the "!" now negates
@example("[b-a!-b]", "-")
@example("[a-", "[a-")
@example("?", "é")
@example("[^a]", "^")
@example("a[", "a[")
@example("*a*", "")
@example("*??", "𝄞")  # one character, of four bytes
@settings(max_examples=700)
def test_fnmatch_rules_equal_python(pattern, name):
    assert _C.glob_match(pattern, name, fnmatch=True) == fnmatch.fnmatchcase(name, pattern)


@given(st.text(alphabet="ab-!]^", max_size=7), st.sampled_from("ab-!]^c"))
@settings(max_examples=700)
def test_sets_equal_python(inside, name):
    pattern = f"[{inside}]"
    assert _C.glob_match(pattern, name, fnmatch=True) == fnmatch.fnmatchcase(name, pattern)


@given(PATTERNS, NAMES)
@example("a?b", "a.b")
@example("[a]", "a")
@example("model.layers.1.*", "model.layers.10.x")
@settings(max_examples=500)
def test_star_rules_make_only_the_star_special(pattern, name):
    expected = re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL) is not None
    assert _C.glob_match(pattern, name) == expected


@given(st.lists(st.sampled_from(["a", "b", "*", "ab", "ba"]), max_size=12).map("".join))
@settings(max_examples=200)
def test_a_pattern_matches_what_its_stars_are_filled_with(pattern):
    assert _C.glob_match(pattern, pattern.replace("*", "bab"))
    assert _C.glob_match(pattern, pattern.replace("*", ""), fnmatch=True)


def test_nul_bytes_are_characters():
    assert _C.glob_match("a\0*", "a\0b")
    assert not _C.glob_match("a\0*", "a")


@each("pattern", ["*a" * 40 + "*b", "*a" * 40, "a*" * 5000, "[a-b]*" * 200 + "c", "*" * 10000 + "b"])
@each("fnmatch_rules", [False, True])
def test_no_pattern_takes_exponential_time(pattern, fnmatch_rules):
    """Exponential time would not end."""
    assert not _C.glob_match(pattern, "a" * 4000 + "d", fnmatch=fnmatch_rules)


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="pattern"):
        _C.glob_match(b"a", "a")
    with pytest.raises(TypeError, match="name"):
        _C.glob_match("a", None)
