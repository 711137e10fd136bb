"""Error that compute="fp8" adds to that of NVFP4 weights: little beside what is there, and less than W4A4."""

import sys
from pathlib import Path

import numpy as np
import pytest

# Behind what is installed: the source tree has a moqext too.
sys.path.append(str(Path(__file__).parents[1]))
numerics = pytest.importorskip("benchmarks.numerics")


@pytest.mark.parametrize("weights", numerics.WEIGHTS)
@pytest.mark.parametrize("kind", numerics.ACTIVATIONS)
def test_fp8_products_of_nvfp4_weights(rng, weights, kind):
    """The median of seven layers: of heavy tails one weight may be most of a layer."""
    sizes = {"rows": 128, "columns": 1024, "tokens": 64}
    found = [numerics.errors(weights, kind, rng, **sizes) for _ in range(7)]
    whole, to_exact = (
        {name: np.median([one[name][i] for one in found]) for name in found[0]} for i in range(2)
    )
    assert 0.02 < to_exact["NVFP4, fp8"] < 0.045
    assert to_exact["NVFP4, fp8"] < 0.55 * to_exact["NVFP4, fp4"]
    # Beside the exact product of the layer itself: layers differ from each other by more than these two do.
    # Two of 400 layers with heavy tails were beyond 1.12; errors of unlike rows may make up for each other.
    beside = np.median([one["NVFP4, fp8"][0] / one["NVFP4, exact"][0] for one in found])
    assert beside < 1.12
    assert whole["NVFP4, fp8"] < 0.9 * whole["NVFP4, fp4"]
    assert np.isfinite(list(whole.values())).all()


@pytest.mark.parametrize("kind", numerics.ACTIVATIONS)
def test_activations_of_mx_weights(rng, kind):
    """Codes of x cost alike by token and by powers of two, whose scales are not as near; more than none."""
    sizes = {"rows": 128, "columns": 1024, "tokens": 64, "configs": numerics.MX_CONFIGS}
    found = [numerics.errors("normal", kind, rng, **sizes) for _ in range(7)]
    for algo in ("MXFP8", "MXFP4"):
        added = {
            way: np.median([one[f"{algo}, {way}"][1] for one in found]) for way in ("exact", "fp8", "mxfp8")
        }
        assert added["exact"] == 0
        assert 0.02 < added["mxfp8"] < 0.035
        assert 0.02 < added["fp8"] < 0.035
