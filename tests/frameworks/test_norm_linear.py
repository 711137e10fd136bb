"""A norm and an FP8 linear as one operation, and the pass that puts it in the place of two."""

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from moqext_torch import norm_linear  # noqa: E402
from moqext_torch.op import find_method  # noqa: E402

COLUMNS = 128
PARTITIONS = [32, 16]
EPS = 1e-5
JOINED = torch.ops.moqext.add_rms_norm_linear.default


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def made(rng, request):
    """x and residual of six rows, the weight of a norm, and the tensors of a linear of two parts."""

    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape)).to(torch.bfloat16)

    codes = normal(sum(PARTITIONS), COLUMNS).to(torch.float8_e4m3fn)
    method = find_method(
        "FP8", COLUMNS, tuple(PARTITIONS), None, torch.bfloat16, torch.device("cpu"), "exact", True
    )
    prepared = method.prepare(
        {
            "weight": codes,
            "weight_scale": torch.tensor([0.5, 0.25]),
            "input_scale": torch.tensor([0.02, 0.02]),
        }
    )
    tensors = [prepared.get(role) for role in ("weight", "weight_scale", "output_scale", "input_scale")]
    tensors[0] = tensors[0].view(torch.uint8)  # which opcheck can compare
    found = [normal(6, COLUMNS), normal(6, COLUMNS), normal(COLUMNS), *tensors, normal(sum(PARTITIONS))]
    return [None if tensor is None else tensor.to(request.param) for tensor in found]


def apart(x, residual, norm_weight, weight, weight_scale, output_scale, input_scale, bias):
    """The two operations, one behind the other."""
    v, z = torch.ops.moqext.add_rms_norm(x, residual, norm_weight, EPS)
    tensors = (weight, weight_scale, output_scale, input_scale, None, None, bias)
    y = torch.ops.moqext.linear(v, *tensors, "FP8", PARTITIONS, None, "exact", True, None, False)
    return y, z


def joined(graph_module):
    found = norm_linear.join_norms(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    return found, [node.target for node in graph_module.graph.nodes]


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 6])
def test_it_is_what_the_two_are(made, rows):
    x, residual, *rest = made
    args = (x[:rows], residual[:rows], rest[0], EPS, *rest[1:], PARTITIONS, True, "exact", False)
    y, z = JOINED(*args)
    expected, total = apart(x[:rows], residual[:rows], *rest)
    assert z.equal(total)
    if x.is_cuda:  # codes and values may run by two kernels
        torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7)
    else:
        assert y.equal(expected)
    torch.library.opcheck(JOINED, args)


def test_a_pair_becomes_one(made):
    module = make_fx(apart)(*made)
    found, targets = joined(module)
    assert found == 1
    assert JOINED in targets
    assert torch.ops.moqext.linear.default not in targets
    assert torch.ops.moqext.add_rms_norm.default not in targets
    y, z = module(*made)
    expected, total = apart(*made)
    assert z.equal(total)
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7)


def test_a_sum_that_nobody_reads(made):
    found, _ = joined(make_fx(lambda *args: apart(*args)[0])(*made))
    assert found == 1


def test_values_that_somebody_else_reads_stay(made):
    def function(x, residual, norm_weight, *rest):
        v, _ = torch.ops.moqext.add_rms_norm(x, residual, norm_weight, EPS)
        *tensors, bias = rest
        args = (*tensors, None, None, bias, "FP8", PARTITIONS, None, "exact", True, None, False)
        return torch.ops.moqext.linear(v, *args), v + 1

    assert joined(make_fx(function)(*made))[0] == 0


def test_a_sum_that_is_read_before_stays(made):
    def function(x, residual, norm_weight, *rest):
        v, z = torch.ops.moqext.add_rms_norm(x, residual, norm_weight, EPS)
        *tensors, bias = rest
        args = (*tensors, None, None, bias, "FP8", PARTITIONS, None, "exact", True, None, False)
        return z + 1, torch.ops.moqext.linear(v, *args)

    assert joined(make_fx(function)(*made))[0] == 0


@pytest.mark.parametrize("what", ["per channel", "scales of the parts"])
def test_linears_of_other_kinds_stay(made, what):
    module = make_fx(apart)(*made)
    linear = module.graph.find_nodes(op="call_function", target=torch.ops.moqext.linear.default)[0]
    place, value = {"per channel": (8, "FP8_PER_CHANNEL_PER_TOKEN"), "scales of the parts": (12, False)}[what]
    linear.update_arg(place, value)
    assert joined(module)[0] == 0


def test_gradients_are_refused(made):
    x, residual, *rest = made
    with pytest.raises(RuntimeError, match="no gradient"):
        JOINED(x.requires_grad_(), residual, rest[0], EPS, *rest[1:], PARTITIONS, True, "exact", False)
