"""`router_logits` on a device, beside products in float64."""

import pytest

from moqext import ops

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]


def normal(rng, *shape, dtype=torch.bfloat16):
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


@pytest.fixture(autouse=True)
def recent():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("before compute capability 9.0")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 17, 64, 65, 130])
@pytest.mark.parametrize(
    "shape", [(128, 2048), (8, 4096), (1, 32), (17, 96), (256, 7168), (60, 1056)], ids=str
)
def test_logits(rng, dtype, wide, tokens, shape):
    x, weight = normal(rng, tokens, shape[1], dtype=dtype), normal(rng, *shape, dtype=dtype)
    found = ops.router_logits(x.cuda(), weight.cuda(), dtype="float32" if wide else None).cpu()
    assert found.dtype == (torch.float32 if wide else dtype)
    assert found.shape == (tokens, shape[0])
    expected = x.double() @ weight.double().T
    sizes = x.double().abs() @ weight.double().abs().T  # sums of float32 lose less than 2^-20 of these
    room = sizes * 2.0**-20 + (0 if wide else expected.abs() * torch.finfo(dtype).eps / 2)
    assert ((found.double() - expected).abs() <= room * 1.01).all()


def test_a_token_has_its_bits_whatever_stands_beside_it(rng):
    x, weight = normal(rng, 130, 2048).cuda(), normal(rng, 128, 2048).cuda()
    whole = ops.router_logits(x, weight, dtype="float32")
    for count in (1, 8, 16, 64):
        assert ops.router_logits(x[:count], weight, dtype="float32").equal(whole[:count])


def test_rows_with_a_stride_and_out(rng):
    wide, weight = normal(rng, 9, 3 * 256).cuda(), normal(rng, 40, 2 * 256).cuda()
    x, part, out = wide[:, 256:512], weight[:, :256], torch.empty(9, 40, dtype=torch.bfloat16, device="cuda")
    assert ops.router_logits(x, part, out=out) is out
    assert out.equal(ops.router_logits(x.contiguous(), part.contiguous()))


def test_in_a_graph(rng):
    x, weight = normal(rng, 4, 2048).cuda(), normal(rng, 128, 2048).cuda()
    expected, graph = ops.router_logits(x, weight), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids = ops.route(ops.router_logits(x, weight), 8, scoring="softmax")
    graph.replay()
    torch.cuda.synchronize()
    own = ops.route(expected, 8, scoring="softmax")
    assert weights.equal(own[0])
    assert ids.equal(own[1])


def test_no_tokens(rng):
    assert ops.router_logits(normal(rng, 0, 64).cuda(), normal(rng, 3, 64).cuda()).shape == (0, 3)


@pytest.mark.parametrize(
    ("x", "weight", "error", "text"),
    [
        ((4, 48), (8, 48), ValueError, "multiple of 32"),
        ((4, 64), (8, 32), ValueError, r"weight: expected shape \[experts, 64\]"),
        ((4, 64), (0, 64), ValueError, "weight: expected shape"),
        ((64,), (8, 64), ValueError, "x: expected rows"),
    ],
)
def test_refusals(rng, x, weight, error, text):
    with pytest.raises(error, match=text):
        ops.router_logits(normal(rng, *x).cuda(), normal(rng, *weight).cuda())


def test_refusals_of_dtypes_and_devices(rng):
    x, weight = normal(rng, 4, 64).cuda(), normal(rng, 8, 64).cuda()
    with pytest.raises(TypeError, match="weight: expected bfloat16"):
        ops.router_logits(x, weight.half())
    with pytest.raises(TypeError, match="x: expected bfloat16"):
        ops.router_logits(x.float(), weight)
    with pytest.raises(TypeError, match="dtype: expected float32"):
        ops.router_logits(x, weight, dtype="float16")
    with pytest.raises(ValueError, match="weight"):
        ops.router_logits(x, weight.cpu())
    with pytest.raises(ValueError, match="multiples of 16"):
        ops.router_logits(x.view(-1)[1:129].view(2, 64), weight)
