"""`moqext.route`: ids and weights have the bits of the reference, and the reference is what routers say."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moqext
from moqext import ops, reference

from .work import each

SCORINGS = ["softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"]
NAN, INF = np.float32(np.nan), np.float32(np.inf)


def same(got, expected):
    """Equal bits; the payload of a NaN is left open."""
    (weights, ids), (expected_weights, expected_ids) = got, expected
    assert (weights.dtype, ids.dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(weights, expected_weights)
    assert (np.signbit(weights) == np.signbit(expected_weights))[~np.isnan(weights)].all()


def bfloat16(values):
    """(raw array, the values that it holds)."""
    codes = reference.encode(values, "bf16")
    return codes, reference.decode(codes, "bf16")


def logits_of(kind, rng, shape):
    if kind == "normal":
        return rng.standard_normal(shape).astype(np.float32)
    if kind == "wide":
        return (rng.standard_normal(shape) * 60).astype(np.float32)
    if kind == "tied":
        return rng.integers(-1, 2, shape).astype(np.float32) * np.float32(rng.choice([0.5, 0.0, 40, -40]))
    if kind == "near":  # next to each other in float32
        return (np.float32(0.75) + rng.integers(0, 3, shape) * np.float32(2**-24)).astype(np.float32)
    special = np.float32([NAN, INF, -INF, 0.0, -0.0, 3e38, -3e38, 1e-45, -87.0, 88.0, 1.0])
    return rng.choice(special, shape)


@st.composite
def options(draw):
    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 8, 24]))
    size = draw(st.integers(1, 1024 // groups)) if draw(st.booleans()) else draw(st.integers(1, 6))
    kept = draw(st.integers(1, groups))
    scoring = draw(st.sampled_from(SCORINGS))
    return (
        groups * size,
        draw(st.integers(1, min(32, kept * size))),
        {
            "scoring": scoring,
            "renormalize": draw(st.booleans()),
            "num_groups": groups,
            "topk_groups": kept,
            "correction_bias": scoring != "topk_softmax" and draw(st.booleans()),
            "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5, 0.1, 1e-30])),
        },
    )


@settings(max_examples=150)
@given(
    options(),
    st.sampled_from(["normal", "wide", "tied", "near", "special"]),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(0, 2**32 - 1),
)
def test_bits_are_those_of_the_reference(case, kind, dtype, seed):
    experts, top_k, chosen = case
    rng = np.random.default_rng(seed)
    x = values = logits_of(kind, rng, (int(rng.integers(0, 9)), experts))
    with np.errstate(over="ignore"):
        if dtype == "float16":
            x = values = x.astype(np.float16)
        elif dtype == "bfloat16":
            x, values = bfloat16(x)
    if chosen["correction_bias"]:
        bias_kind = rng.choice(["normal", "tied", "special"])
        chosen["correction_bias"] = logits_of(bias_kind, rng, experts) * np.float32(rng.choice([1, 0.01]))
    else:
        chosen["correction_bias"] = None
    same(moqext.route(x, top_k, **chosen), reference.route(values, top_k, **chosen))


CHILD = """
import sys
import numpy as np
from moqext import _C, reference, route
rng = np.random.default_rng(int(sys.argv[1]))
for scoring in ("softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"):
    for groups, kept in ((1, 1), (6, 2)):
        for bias in (None, rng.standard_normal(96).astype(np.float32)):
            if bias is not None and scoring == "topk_softmax":
                continue
            x = (rng.standard_normal((40, 96)) * rng.choice([0.1, 1, 40], (40, 1))).astype(np.float32)
            keys = dict(scoring=scoring, num_groups=groups, topk_groups=kept, correction_bias=bias)
            got, expected = route(x, 7, **keys), reference.route(x, 7, **keys)
            assert all(a.tobytes() == b.tobytes() for a, b in zip(got, expected)), keys
print(_C.cpu_isa())
"""


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_every_level_of_vector_extensions_has_the_same_bits(isa, rng):
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(rng.integers(2**32))],
        env=os.environ | {"MOQEXT_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    if child.stdout.strip() != isa:
        pytest.skip(f"this processor has no {isa}: {child.stdout.strip()} ran")


def plain(x, ids, scoring, renormalize):
    """Weights of chosen experts by the formulas of the docstring, in float64."""
    x = x.astype(np.float64)
    if scoring == "softmax":
        score = np.exp(x - x.max(-1, keepdims=True))
        score /= 1 if renormalize else score.sum(-1, keepdims=True)
    elif scoring == "topk_softmax":
        chosen = np.take_along_axis(x, ids, -1)
        score = np.exp(x - chosen.max(-1, keepdims=True)) / np.exp(
            chosen - chosen.max(-1, keepdims=True)
        ).sum(-1, keepdims=True)
    elif scoring == "sigmoid":
        score = 1 / (1 + np.exp(-x))
    else:
        score = np.sqrt(np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0))
    weights = np.take_along_axis(score, ids, -1)
    return weights / (weights.sum(-1, keepdims=True) + 1e-20) if renormalize else weights


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_weights_are_the_formulas_within_float32_rounding(rng, scoring, renormalize):
    """At most 2 units in the last place for exp, 1 to 2 each for a sum, a division and a product.

    softmax rounds x - max x before exp, which makes half a unit of the difference, a relative error of its
    size, twice where the chosen ones are far from the best.
    """
    for spread in (0.3, 3, 20):
        x = (rng.standard_normal((64, 160)) * spread).astype(np.float32)
        biases = [None]
        if (
            scoring != "topk_softmax" and spread <= 3
        ):  # so that exp(x - max x) stays clear of its end at 1e-38
            biases.append(rng.standard_normal(160).astype(np.float32))
        for bias in biases:
            weights, ids = moqext.route(x, 8, scoring=scoring, renormalize=renormalize, correction_bias=bias)
            expected = plain(x, ids, scoring, renormalize)
            span = (x.max(-1) - x.min(-1)).max() if "softmax" in scoring else 0
            assert (np.abs(weights - expected) <= (8 + 2 * span) * 2.0**-24 * expected + 2e-38).all()


def test_exp_and_log1p_are_within_two_units_in_the_last_place(rng):
    x = -np.exp(rng.uniform(-20, np.log(87), (2000, 1))).astype(np.float32)
    two = np.concatenate([np.zeros_like(x), x], 1)
    weights, ids = moqext.route(two, 2, scoring="softmax", renormalize=False)
    assert (ids == [0, 1]).all()
    x = x.astype(np.float64)
    assert np.allclose(weights[:, 1:] / weights[:, :1], np.exp(x), rtol=4 * 2.0**-23, atol=0)
    weights, _ = moqext.route(two[:, 1:], 1, scoring="sqrtsoftplus")
    assert np.allclose(weights, np.sqrt(np.log1p(np.exp(x))), rtol=3 * 2.0**-23, atol=0)


def by_hand(v, top_k, groups, kept, two):
    """The choice for one token of v without NaN, with sorted() alone."""
    size = len(v) // groups
    members = [sorted(v[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
    value = [np.float32(m[0] + m[1]) if two and size > 1 else m[0] for m in members]
    best = sorted(range(groups), key=lambda g: (-value[g], g))[:kept]
    inside = [i for i in range(len(v)) if i // size in best]
    return sorted(inside, key=lambda i: (-v[i], i))[:top_k]


@pytest.mark.parametrize("groups, kept", [(1, 1), (4, 2), (16, 5), (8, 1)])
def test_ties_go_to_the_lower_index(rng, groups, kept):
    """Ties of experts and of groups, with logits of three values."""
    x = rng.integers(-1, 2, (100, 16)).astype(np.float32)
    top_k = min(kept * 16 // groups, 6)
    keys = {"num_groups": groups, "topk_groups": kept}
    for scoring in SCORINGS:
        _, ids = moqext.route(x, top_k, scoring=scoring, **keys)
        assert ids.tolist() == [by_hand(row, top_k, groups, kept, False) for row in x]
    # sigmoid(-200) is 0: what is left of score + bias is the bias, exactly
    bias = rng.integers(-1, 2, 16).astype(np.float32)
    low = np.full((1, 16), -200, np.float32)
    _, ids = moqext.route(low, top_k, scoring="sigmoid", correction_bias=bias, **keys)
    assert ids.tolist() == [by_hand(bias, top_k, groups, kept, True)]


@each("groups, kept", [(1, 1), (4, 2), (8, 3)])
@each("scoring, score", [("softmax", 1 / 16), ("sigmoid", 0.0), ("sqrtsoftplus", 0.0)])
def test_ties_of_score_and_bias_go_to_the_lower_index(rng, scoring, score, groups, kept):
    """Logits of -200 have one exact score, so that the bias has three values and v as many."""
    bias = rng.integers(-1, 2, 16).astype(np.float32)
    keys = {"num_groups": groups, "topk_groups": kept, "correction_bias": bias}
    top_k = min(kept * 16 // groups, 6)
    weights, ids = moqext.route(np.full((3, 16), -200, np.float32), top_k, scoring=scoring, **keys)
    v = np.float32(score) + bias
    assert ids.tolist() == [by_hand(v, top_k, groups, kept, True)] * 3
    assert (weights == np.float32(score)).all()


def test_minus_zero_ties_with_zero():
    x = np.float32([[-0.0, 0.0, -0.0, 0.0]])
    _, ids = moqext.route(x, 3, scoring="softmax")
    assert ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("scoring", SCORINGS)
def test_logits_that_differ_are_never_taken_for_equals(scoring):
    """Where a sigmoid saturates, and where softmax has the same float32 for both."""
    x = np.float32([[30, 40, 50, 35], [1e-9, 2e-9, 3e-9, 0]])
    _, ids = moqext.route(x, 4, scoring=scoring)
    assert ids.tolist() == [[2, 1, 3, 0], [2, 1, 0, 3]]


def test_the_bias_chooses_and_does_not_weigh(rng):
    x = rng.standard_normal((5, 8)).astype(np.float32)
    bias = np.zeros(8, np.float32)
    bias[3] = 100
    weights, ids = moqext.route(x, 2, scoring="sigmoid", correction_bias=bias, routed_scaling_factor=2.5)
    assert (ids[:, 0] == 3).all()
    assert np.allclose(weights[:, 0], 2.5 / (1 + np.exp(-x[:, 3].astype(np.float64))), rtol=1e-6)


def test_a_group_counts_as_its_two_best_with_a_bias_and_as_its_best_without():
    x = np.float32([[5, -9, -9, 4, 4, -9]])  # groups of three: one large logit, or two nearly as large
    assert moqext.route(x, 1, scoring="sigmoid", num_groups=2, topk_groups=1)[1].tolist() == [[0]]
    keys = {"num_groups": 2, "topk_groups": 1, "correction_bias": np.zeros(6, np.float32)}
    assert moqext.route(x, 1, scoring="sigmoid", **keys)[1].tolist() == [[3]]


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_nan_logits_come_last_and_weigh_nan_only_where_chosen(scoring, renormalize):
    x = np.float32([[NAN, 1, -INF, 2, NAN], [0, NAN, 0, 0, 0], [NAN] * 5])
    weights, ids = moqext.route(x, 4, scoring=scoring, renormalize=renormalize)
    assert ids.tolist() == [[3, 1, 2, 0], [0, 2, 3, 4], [0, 1, 2, 3]]
    assert np.isnan(weights).tolist() == [[False] * 3 + [True], [False] * 4, [True] * 4]
    few, _ = moqext.route(np.float32([[1, -INF, 2]]), 3, scoring=scoring, renormalize=renormalize)
    np.testing.assert_array_equal(weights[0, :3], few[0])  # as if the NaN were not there


@pytest.mark.parametrize("scoring", SCORINGS)
def test_nan_logits_in_groups(scoring):
    """A group counts as its best logit that is a number; of all NaN, it comes last, behind -infinity."""
    x = np.float32([[NAN, 3, NAN, NAN, 1, 2], [NAN, NAN, -INF, NAN, NAN, NAN]])
    weights, ids = moqext.route(x, 3, scoring=scoring, num_groups=3, topk_groups=2)
    assert ids.tolist() == [[1, 5, 4], [2, 0, 1]]
    assert np.isnan(weights).tolist() == [[False] * 3, [False, True, True]]
    if scoring == "topk_softmax":
        return
    # with a bias two members count: one NaN among them makes the group the last
    keys = {"num_groups": 3, "topk_groups": 1, "correction_bias": np.zeros(6, np.float32)}
    _, ids = moqext.route(np.float32([[NAN, 9, 0, 0, 1, NAN]]), 2, scoring=scoring, **keys)
    assert ids.tolist() == [[2, 3]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_nan_logits_with_a_bias_come_last(scoring):
    x, bias = np.float32([[NAN, 1, 2, NAN]]), np.float32([9, 0, 0, 9])
    weights, ids = moqext.route(x, 3, scoring=scoring, correction_bias=bias)
    assert ids.tolist() == [[2, 1, 0]]
    assert np.isnan(weights).tolist() == [[False, False, True]]


def test_nan_in_the_bias_comes_last_and_leaves_the_weight():
    x = np.zeros((1, 3), np.float32)
    weights, ids = moqext.route(x, 3, scoring="sigmoid", correction_bias=np.float32([NAN, -INF, 0]))
    assert ids.tolist() == [[2, 1, 0]]
    assert weights.tolist() == [[0.5, 0.5, 0.5]]


def test_infinite_logits():
    x = np.float32([[INF, 3, -INF, INF], [-INF] * 4])
    for scoring in ("softmax", "topk_softmax"):
        weights, ids = moqext.route(x, 4, scoring=scoring)
        assert ids.tolist() == [[0, 3, 1, 2], [0, 1, 2, 3]]
        assert weights.tolist() == [[0.5, 0.5, 0, 0], [0.25] * 4]
    weights, _ = moqext.route(x, 4, scoring="sigmoid")
    assert weights[0, [0, 1, 3]].tolist() == [1, 1, 0]
    assert weights[1].tolist() == [0] * 4
    assert moqext.route(x, 1, scoring="sqrtsoftplus")[0].tolist() == [[INF], [0]]


def test_scores_of_nothing_are_renormalized_to_nothing():
    weights, _ = moqext.route(np.full((2, 4), -500, np.float32), 2, scoring="sigmoid", renormalize=True)
    assert weights.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0, 0, 8), (8,), (2, 3, 8)], ids=str)
def test_leading_dimensions_and_no_tokens(rng, shape):
    x = rng.standard_normal(shape).astype(np.float32)
    weights, ids = moqext.route(x, 3, scoring="softmax", renormalize=True)
    assert weights.shape == ids.shape == (*shape[:-1], 3)
    same((weights, ids), reference.route(x, 3, scoring="softmax", renormalize=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_any_strides(rng, dtype):
    whole = rng.standard_normal((6, 10, 40)).astype(dtype)
    bias = rng.standard_normal(80).astype(dtype)[::-2]
    for x in (whole[::2, ::-3, :], whole.transpose(1, 0, 2), np.broadcast_to(whole[0, 0], (5, 40))):
        keys = {"scoring": "sigmoid", "correction_bias": bias}
        same(
            moqext.route(x, 4, **keys),
            reference.route(x.copy(), 4, **keys | {"correction_bias": bias.copy()}),
        )
    x = whole.transpose(2, 1, 0)[:, :, ::-2]
    same(moqext.route(x, 3, scoring="softmax"), reference.route(x.copy(), 3, scoring="softmax"))


def test_results_do_not_depend_on_threads_or_other_tokens(rng):
    x = rng.standard_normal((3000, 128)).astype(np.float32)
    bias = rng.standard_normal(128).astype(np.float32)
    keys = {"scoring": "sigmoid", "correction_bias": bias, "num_groups": 8, "topk_groups": 3}
    try:
        moqext.set_num_threads(1)
        alone = moqext.route(x, 8, **keys)
        for threads in (2, 3, 5):
            moqext.set_num_threads(threads)
            same(moqext.route(x, 8, **keys), alone)
    finally:
        moqext.set_num_threads(0)
    for i in rng.integers(0, 3000, 20):
        same(moqext.route(x[i : i + 1], 8, **keys), (alone[0][i : i + 1], alone[1][i : i + 1]))


def test_out_is_written_and_handed_back(rng):
    x = rng.standard_normal((7, 16)).astype(np.float32)
    out = np.full((7, 3), NAN), np.full((7, 3), -7, np.int32)
    result = ops.route(x, 3, scoring="softmax", out=out)
    assert result[0] is out[0]
    assert result[1] is out[1]
    same(result, reference.route(x, 3, scoring="softmax"))


X = np.zeros((4, 12), np.float32)
RIGHT = {"router_logits": X, "top_k": 2, "scoring": "sigmoid"}
WRONG = [
    (
        {"router_logits": X.astype(np.float64)},
        TypeError,
        "^router_logits: expected float32, bfloat16 or float16",
    ),
    ({"router_logits": X.astype(np.int32)}, TypeError, "^router_logits: .* got int32"),
    ({"router_logits": np.float32(1)}, (TypeError, ValueError), "^router_logits: "),
    ({"router_logits": np.zeros((4, 0), np.float32)}, ValueError, r"^router_logits: .*1 to 1024 .* \[4, 0\]"),
    ({"router_logits": np.zeros((1, 1025), np.float32)}, ValueError, r"^router_logits: .* \[1, 1025\]"),
    ({"top_k": 0}, ValueError, "^top_k: "),
    ({"top_k": 13}, ValueError, "^top_k: expected 1 to 12 .* got 13"),
    ({"top_k": 33, "router_logits": np.zeros((1, 64), np.float32)}, ValueError, "^top_k: expected 1 to 32"),
    (
        {"top_k": 5, "num_groups": 6, "topk_groups": 2},
        ValueError,
        "^top_k: expected 1 to 4 for 2 of 6 groups of 2",
    ),
    ({"top_k": 1.0}, TypeError, "^top_k: "),
    ({"top_k": None}, TypeError, "^top_k: "),
    ({"scoring": "softmin"}, ValueError, "^scoring: expected 'softmax'.* got 'softmin'"),
    ({"scoring": None}, TypeError, "^scoring: "),
    ({"renormalize": 1}, TypeError, "^renormalize: expected True or False"),
    ({"renormalize": None}, TypeError, "^renormalize: "),
    (
        {"num_groups": 5, "topk_groups": 1},
        ValueError,
        "^num_groups: expected a divisor of the 12 experts, got 5",
    ),
    ({"num_groups": 0}, ValueError, "^num_groups: "),
    ({"num_groups": None}, TypeError, "^num_groups: "),
    ({"num_groups": 4}, ValueError, "^topk_groups: expected 1 to num_groups = 4, got none"),
    ({"num_groups": 4, "topk_groups": 5}, ValueError, "^topk_groups: expected 1 to num_groups = 4, got 5"),
    ({"topk_groups": 2}, ValueError, "^topk_groups: "),
    ({"correction_bias": X[0, :11]}, ValueError, r"^correction_bias: expected shape \[12\], got \[11\]"),
    ({"correction_bias": X[:1]}, ValueError, r"^correction_bias: .* got \[1, 12\]"),
    ({"correction_bias": X[0].astype(np.int64)}, TypeError, "^correction_bias: .* got int64"),
    ({"correction_bias": X[0], "scoring": "topk_softmax"}, ValueError, "^correction_bias: expected None"),
    ({"correction_bias": [0.0] * 12}, TypeError, "^correction_bias: "),
    *[
        ({"routed_scaling_factor": f}, ValueError, "^routed_scaling_factor: .*positive")
        for f in (0, -1, NAN, INF, 1e39)
    ],
    ({"routed_scaling_factor": "2"}, TypeError, "^routed_scaling_factor: expected a number"),
    ({"stream": 7}, (TypeError, ValueError, BufferError), "^stream: "),
]


@each("change, error, message", WRONG)
def test_bad_arguments_are_named_and_nothing_is_written(change, error, message):
    out = np.full((4, 2), 7, np.float32), np.full((4, 2), 7, np.int32)
    with pytest.raises(error, match=message):
        moqext.route(**RIGHT | {"out": out} | change)
    assert (out[0] == 7).all()
    assert (out[1] == 7).all()


def test_bad_outputs_are_named_and_nothing_is_written():
    floats, ints = np.full((4, 2), 7, np.float32), np.full((4, 2), 7, np.int32)
    locked = floats.copy()
    locked.flags.writeable = False
    memory = np.full(16, 7, np.float32)
    overlap = memory[:8].reshape(4, 2), memory[7:15].view(np.int32).reshape(4, 2)
    for out, error, message in [
        ((ints, ints.copy()), TypeError, r"^out\[0\]: expected float32"),
        ((floats, floats.copy()), TypeError, r"^out\[1\]: expected int32"),
        ((floats[:3], ints), ValueError, r"^out\[0\]: expected shape \[4, 2\], got \[3, 2\]"),
        ((floats, ints.astype(np.int64)), TypeError, r"^out\[1\]: expected int32"),
        ((floats, np.zeros((4, 4), np.int32)[:, ::2]), ValueError, r"^out\[1\]: "),
        ((locked, ints), BufferError, r"^out\[0\]: "),
        ((X[:1, :8].reshape(4, 2), ints), BufferError, r"^out\[0\]: its memory overlaps"),
        (overlap, BufferError, r"^out\[1\]: its memory overlaps"),
        ([floats, ints], TypeError, r"^out: expected a tuple \(weights, ids\)"),
        ((floats,), TypeError, r"^out: expected a tuple"),
        ((floats, None), TypeError, r"^out\[1\]: "),
    ]:
        with pytest.raises(error, match=message):
            moqext.route(**RIGHT, out=out)
    assert (floats == 7).all()
    assert (ints == 7).all()
    assert (X == 0).all()
    assert (memory == 7).all()


def test_torch_tensors_in_and_out(rng):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(rng.standard_normal((6, 3, 32)).astype(np.float32)).to(torch.bfloat16)
    weights, ids = moqext.route(x, 4, scoring="softmax", renormalize=True)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    same(
        (weights.numpy(), ids.numpy()),
        reference.route(x.float().numpy(), 4, scoring="softmax", renormalize=True),
    )


def test_subnormal_weights_do_not_depend_on_the_mode_of_the_thread(rng):
    """torch.set_flush_denormal would make them zeros."""
    torch = pytest.importorskip("torch")
    x = rng.uniform(-87, -80, (300, 64)).astype(np.float32)
    keys = {"scoring": "sigmoid", "routed_scaling_factor": 2.0**-20}
    expected = reference.route(x, 8, **keys)
    assert (expected[0] > 0).all()
    assert (expected[0] < np.finfo(np.float32).tiny).all()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        got = moqext.route(x, 8, **keys)
    finally:
        torch.set_flush_denormal(False)
    same(got, expected)


@pytest.mark.parametrize("shape", [(7,), (2, 5), ()], ids=str)
def test_tokens_that_are_padding_have_no_experts(rng, shape):
    x, padding = rng.standard_normal((*shape, 16)).astype(np.float32), rng.random(shape) < 0.5
    padding = np.asarray(padding)
    weights, ids = moqext.route(x, 3, scoring="softmax")
    found = moqext.route(x, 3, scoring="softmax", padding=padding)
    np.testing.assert_array_equal(found[0], weights)
    np.testing.assert_array_equal(found[1], np.where(padding[..., None], -1, ids))
    same(found, reference.route(x, 3, scoring="softmax", padding=padding))


@pytest.mark.parametrize(
    ("padding", "error", "text"),
    [
        (np.zeros(4, bool), ValueError, "padding: expected the shape"),
        (np.zeros((3, 1), bool), ValueError, "padding: expected the shape"),
        (np.zeros(6, bool)[::2], ValueError, "no gaps"),
        (np.zeros(3, np.uint8), TypeError, "padding: expected bool"),
    ],
)
def test_refusals_of_padding(padding, error, text):
    with pytest.raises(error, match=text):
        moqext.route(np.zeros((3, 8), np.float32), 2, scoring="softmax", padding=padding)
