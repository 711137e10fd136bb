"""Gradients through frozen linears on the device: the weight of packed and swizzled tensors is the CPU's."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", minversion="2.10")

from moqext import UnsupportedQuantization  # noqa: E402
from moqext.tools.random_layers import random_linear  # noqa: E402
from moqext_torch import as_torch  # noqa: E402
from moqext_torch.dequantized import weight_of  # noqa: E402

from ..frameworks.torch_cases import ALGOS, case_of, filled, random_x  # noqa: E402
from ..test_batch_invariance import LINEARS  # noqa: E402
from .cases import params_to_cuda  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("algo, compute", [kind for kind in LINEARS if kind[1] != "fp8"])
def test_the_weight_of_prepared_tensors(rng, algo, compute):
    case = random_linear(rng, algo, [130, 70], 384)
    found = []
    for device in ("cpu", "cuda:0"):
        try:
            method = case.method(compute=compute, device=device)
        except UnsupportedQuantization as error:
            pytest.skip(str(error))
        stored = case.listed() if device == "cpu" else params_to_cuda(case.listed())
        params = {role: as_torch(tensor) for role, tensor in method.prepare(stored).items()}
        codes = params["weight"]
        if codes.dtype == torch.uint8 and tuple(codes.shape) == (200, 384):
            params["weight"] = codes.view(torch.float8_e4m3fn)
        found.append(weight_of(params, (200, 384), [130, 70], method.group_size, torch.float32).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=3e-7, atol=3e-7 * float(found[0].abs().max()))


@pytest.mark.parametrize("algo", ALGOS)
def test_gradients_of_x(rng, algo):
    case = case_of(rng, algo, (128, 64), 256)
    layer = filled(case).to("cuda").prepare()
    x = random_x(rng, case, 9).cuda().requires_grad_()
    out = torch.from_numpy(rng.standard_normal((9, 192), dtype=np.float32)).to("cuda", torch.bfloat16)
    layer(x).backward(out)
    expected = out.double() @ layer.dequantize(torch.float32).double()
    assert torch.linalg.norm(x.grad.double() - expected) <= 4e-3 * torch.linalg.norm(expected)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    again = x.detach().clone().requires_grad_()
    compiled(again).backward(out)
    assert again.grad.equal(x.grad)
