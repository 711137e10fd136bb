"""Routing of tokens to experts, every operation in float32 and in the order given here.

The bits are laid down, so that every processor chooses the same experts: each operation rounds once, sums
have one order, exp and log1p are polynomials, within two units in the last place.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moqext.reference.fused import fma
from moqext.reference.numbers import F32, as_float32

ONE = np.float32(1)
LOG2E = np.float32(float.fromhex("0x1.715476p+0"))
LN2 = np.float32(float.fromhex("0x1.62e43p-1"))
LN2_LOW = np.float32(float.fromhex("-0x1.05c61p-29"))

EXP = [np.float32(float.fromhex(c)) for c in ("0x1.6a23dp-10", "0x1.123a2p-7", "0x1.5558f2p-5")]
EXP += [np.float32(float.fromhex(c)) for c in ("0x1.555492p-3", "0x1.fffffcp-2")]
"""Coefficients of (exp(r) - 1 - r) / r^2 on [-ln 2 / 2, ln 2 / 2], the highest power first; relative error
3.6e-9 of exp."""

ATANH = [np.float32(float.fromhex(c)) for c in ("0x1.1ee0aap-3", "0x1.1ebb62p-3")]
ATANH += [np.float32(float.fromhex(c)) for c in ("0x1.99d22p-3", "0x1.555502p-2")]
"""Coefficients of (atanh(z) / z - 1) / z^2 in powers of z^2 up to 1/9, the highest first; relative error
5.7e-9 of atanh."""


def _horner(coefficients: list[np.float32], x: F32) -> F32:
    value: F32 = np.full(x.shape, coefficients[0], np.float32)
    for c in coefficients[1:]:
        value = fma(value, x, c)
    return value


def _exp(y: F32) -> F32:
    """exp(y) for y <= 0; 0 below -87 and for a NaN."""
    inside = y >= np.float32(-87)
    y = np.where(inside, y, np.float32(-87))
    n = np.rint(y.astype(np.float64) * np.float64(LOG2E)).astype(np.float32)
    r = fma(n, -LN2_LOW, fma(n, -LN2, y))
    e = ONE + fma(_horner(EXP, r), r * r, r)
    return np.where(inside, np.ldexp(e, n.astype(np.int32)), np.float32(0))


def _log1p(e: F32) -> F32:
    """log(1 + e) for 0 <= e <= 1, as 2 atanh(e / (2 + e))."""
    z = e / (np.float32(2) + e)
    w, t = z * z, z + z
    return fma(t, w * _horner(ATANH, w), t)


def _score(scoring: str, x: F32, most: F32) -> F32:
    """Scores of logits, those of softmax not yet divided by their sum."""
    if scoring in ("softmax", "topk_softmax"):
        return _exp(np.where(x == most, np.float32(0), x - most))
    e = _exp(-np.abs(x))
    if scoring == "sigmoid":
        return np.asarray(np.where(x >= 0, ONE, e) / (ONE + e), np.float32)
    if scoring == "sqrtsoftplus":
        return np.asarray(np.sqrt(np.where(x > 0, x, np.float32(0)) + _log1p(e)), np.float32)
    raise ValueError(f"scoring: expected softmax, topk_softmax, sigmoid or sqrtsoftplus, got {scoring!r}")


def _sum_of_lanes(u: F32) -> F32:
    """Along the last axis: 32 sums of every 32nd value in order, then halves added until one is left."""
    padded = np.pad(u, [(0, 0)] * (u.ndim - 1) + [(0, -u.shape[-1] % 32)])
    lanes = np.zeros((*u.shape[:-1], 32), np.float32)
    for begin in range(0, padded.shape[-1], 32):
        lanes = lanes + padded[..., begin : begin + 32]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes


def _sum_in_order(u: F32) -> F32:
    total = np.zeros((*u.shape[:-1], 1), np.float32)
    for i in range(u.shape[-1]):
        total = total + u[..., i : i + 1]
    return total


def _best_first(values: F32) -> NDArray[np.intp]:
    """Indices along the last axis from the largest value down, of equals the lower first, NaN at the end."""
    return np.argsort(-values, axis=-1, kind="stable")


def _group_values(v: F32, biased: bool) -> F32:
    """Scores of groups [..., G, members]: the sum of the two best members or, without a bias, the best."""
    best = np.take_along_axis(v, _best_first(v), -1)
    return best[..., 0] + best[..., 1] if biased and v.shape[-1] > 1 else best[..., 0]


def _choose(v: F32, top_k: int, groups: int, kept: int, biased: bool) -> NDArray[np.int32]:
    members = v.reshape(*v.shape[:-1], groups, v.shape[-1] // groups)
    order = _best_first(_group_values(members, biased))
    place = np.argsort(order, axis=-1)  # of each group among the groups
    out = np.repeat(place >= kept, members.shape[-1], axis=-1)
    return np.lexsort((-v, out), axis=-1)[..., :top_k].astype(np.int32)


def route(
    router_logits: ArrayLike,
    top_k: int,
    *,
    scoring: str,
    renormalize: bool = False,
    num_groups: int = 1,
    topk_groups: int | None = None,
    correction_bias: ArrayLike | None = None,
    routed_scaling_factor: float = 1.0,
    padding: ArrayLike | None = None,
) -> tuple[F32, NDArray[np.int32]]:
    """The experts of every token and their weights, as `moqext.route` describes them.

        v = logits, or score + bias      experts and groups are chosen by v, the best first
        weight = score / (sum of the chosen scores + 1e-20) * factor, or score * factor
        softmax: u = exp(x - max x); score = u / sum of all u, but u itself where weights are renormalized
        sigmoid: 1 / (1 + exp(-x)); sqrtsoftplus: sqrt(log(1 + exp(x)))

    Args:
        router_logits: [..., E].
        top_k: experts of a token.
        scoring: "softmax", "topk_softmax", "sigmoid" or "sqrtsoftplus".
        renormalize: divide by the sum of the chosen scores; always so with "topk_softmax".
        num_groups: groups of neighbours, a divisor of E.
        topk_groups: groups that experts are chosen from; None where there is one group.
        correction_bias: [E] or None.
        routed_scaling_factor: rounded to float32.
        padding: bool [...]: tokens without experts, whose ids are -1; or None.

    Returns:
        weights float32 [..., top_k], ids int32 [..., top_k].

    Raises:
        ValueError: an unknown scoring, or a bias with "topk_softmax".
    """
    x = as_float32(router_logits)
    renormalize = renormalize or scoring == "topk_softmax"
    biased = correction_bias is not None
    if biased and scoring == "topk_softmax":
        raise ValueError("correction_bias: expected None with topk_softmax")
    with np.errstate(all="ignore"):
        known = np.where(np.isnan(x), -np.inf, x)
        most = known.max(axis=-1, keepdims=True).astype(np.float32)
        u = np.where(np.isnan(x), np.float32(0), _score(scoring, x, most))
        divisor = _sum_of_lanes(u) if scoring == "softmax" else ONE
        v = x
        if correction_bias is not None:
            v = np.where(np.isnan(x), np.float32(np.nan), u / divisor + as_float32(correction_bias))
        ids = _choose(v, top_k, num_groups, topk_groups or num_groups, biased)
        chosen = np.take_along_axis(u, ids, -1)
        if renormalize:
            divisor = _sum_in_order(chosen) + np.float32(1e-20)
        weights = chosen / divisor * np.float32(routed_scaling_factor)
    is_known = ~np.isnan(np.take_along_axis(x, ids, -1))
    if padding is not None:
        ids = np.where(np.asarray(padding)[..., None], np.int32(-1), ids)
    return np.where(is_known, weights, np.float32(np.nan)), ids
