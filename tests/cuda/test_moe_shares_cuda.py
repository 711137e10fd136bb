"""Shares of experts and of their columns on the device, by every kernel that can be forced.

The bits are those of the whole on the kernels for any chip: their tiles follow from how many rows an expert
has on average, which is the same for a share that knows how many experts there are in all. The kernels for
few tokens share out K by what a call has altogether; tests without a kernel hold them to the same sums.
"""

from typing import Any

import pytest

from moqext import MoEMethod, UnsupportedQuantization

from ..test_moe_shares import (  # noqa: F401
    EXPERTS,
    HIDDEN,
    INNER,
    TOP_K,
    test_codes_that_were_sent_to_shares,
    test_exact_sums_of_columns_add_up_bit_by_bit,
    test_shares_of_columns_are_what_they_mean,
    test_shares_of_experts_add_up_bit_by_bit,
    test_shares_of_experts_in_any_order,
    test_tokens_of_one_share_add_up_bit_by_bit,
)

pytestmark = pytest.mark.gpu

pytest.importorskip("torch")

KERNELS = ("cuda:simt", "cuda:sm89_fp8", "cuda:sm80_fp8", "cuda:sm80_nvfp4", "cuda:sm80_nvfp4_fp8")
FREE = (
    "test_codes_that_were_sent_to_shares",
    "test_exact_sums_of_columns_add_up_bit_by_bit",
    "test_shares_of_columns_are_what_they_mean",
    "test_shares_of_experts_in_any_order",
)
"""Tests that hold whichever kernel is chosen."""


@pytest.fixture(scope="session")
def device() -> str:
    """Device of the layers that the CPU's tests make in this module."""
    return "cuda:0"


@pytest.fixture(autouse=True, params=[*KERNELS, None])
def kernel(request: Any, monkeypatch: Any) -> None:
    """Forces a kernel; skips what it cannot run, and what no choice of kernels promises."""
    given = request.node.callspec.params
    if request.param is None:
        if request.node.originalname not in FREE:
            pytest.skip("bits of one kernel")
        return
    monkeypatch.setenv("MOQEXT_KERNEL", request.param)
    options = {"compute": given.get("compute", "exact"), "dtype": given.get("dtype", "float32")}
    try:
        MoEMethod(given["algo"], EXPERTS, HIDDEN, INNER, top_k=TOP_K, device="cuda:0", **options)
    except UnsupportedQuantization as error:
        pytest.skip(str(error))
