"""Operations of torch between linears, and the functions around the dispatcher."""

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

import moqext_torch  # noqa: E402
from moqext import ops  # noqa: E402

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAMED = torch.ops.moqext


def normal(rng, *shape, dtype=torch.bfloat16):
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def calls(rng, dtype=torch.bfloat16):
    """(function, operation, arguments) of each; the order of the operation's differs with a residual."""
    x, weight = normal(rng, 2, 3, 64, dtype=dtype), normal(rng, 64, dtype=dtype)
    other = normal(rng, 2, 3, 64, dtype=dtype)
    heads, angles = normal(rng, 2, 3, 4, 16, dtype=dtype), normal(rng, 1, 3, 16, dtype=dtype)
    return {
        "rms_norm": (moqext_torch.rms_norm, NAMED.rms_norm.default, (x, weight, 1e-5)),
        "add_rms_norm": (
            lambda x, residual, weight, eps: moqext_torch.rms_norm(x, weight, eps, residual),
            NAMED.add_rms_norm.default,
            (x, other, weight, 1e-5),
        ),
        "silu_and_mul": (moqext_torch.silu_and_mul, NAMED.silu_and_mul.default, (x,)),
        "rotary_embedding": (
            moqext_torch.rotary_embedding,
            NAMED.rotary_embedding.default,
            (heads[:, :, 1:], angles, angles.flip(-1)),
        ),
        "route": (
            lambda logits, top_k, scoring, renormalize, groups, kept, bias, factor: moqext_torch.route(
                logits,
                top_k,
                scoring=scoring,
                renormalize=renormalize,
                num_groups=groups,
                topk_groups=kept,
                correction_bias=bias,
                routed_scaling_factor=factor,
            ),
            NAMED.route.default,
            (x, 3, "sigmoid", True, 8, 4, weight, 2.5),
        ),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_beside_the_values_of_a_norm(rng, dtype):
    from moqext_torch.activations import rms_norm_with_codes

    x, other, weight = (normal(rng, *shape, dtype=dtype) for shape in ((3, 64), (3, 64), (64,)))
    scale = torch.tensor([0.03])
    v, codes = rms_norm_with_codes(x, weight, 1e-5, scale)
    assert v.equal(moqext_torch.rms_norm(x, weight, 1e-5))
    assert codes.view(torch.uint8).equal(ops.quantize(v, "fp8_tensor", scale=scale)[0].view(torch.uint8))
    v, codes, z = rms_norm_with_codes(x, weight, 1e-5, scale, other)
    assert same((v, z), moqext_torch.rms_norm(x, weight, 1e-5, other))
    assert codes.view(torch.uint8).equal(ops.quantize(v, "fp8_tensor", scale=scale)[0].view(torch.uint8))
    assert rms_norm_with_codes(x.to("meta"), weight, 1e-5, scale) is None
    with pytest.raises(RuntimeError, match="no gradient"):
        rms_norm_with_codes(x.requires_grad_(), weight, 1e-5, scale)


NAMES = ("rms_norm", "add_rms_norm", "silu_and_mul", "rotary_embedding", "route")


def same(first, second):
    pairs = zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]
    return all(one.equal(two) for one, two in pairs)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_operations_are_what_the_functions_are(rng, name, dtype):
    function, operation, args = calls(rng, dtype)[name]
    assert same(function(*args), operation(*args))
    torch.library.opcheck(operation, args)
    empty = tuple(arg[:0] if isinstance(arg, torch.Tensor) and arg.dim() > 2 else arg for arg in args)
    if name != "rotary_embedding":
        torch.library.opcheck(operation, empty)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_near_torchs(rng, dtype):
    """A last bit of the dtype apart at most where a sum or an exponential rounds otherwise."""
    step = torch.finfo(dtype).eps
    x, weight = normal(rng, 5, 96, dtype=dtype), normal(rng, 96, dtype=dtype)
    expected = torch.nn.functional.rms_norm(x.double(), (96,), weight.double(), 1e-5)
    torch.testing.assert_close(
        moqext_torch.rms_norm(x, weight, 1e-5).double(), expected, rtol=2 * step, atol=step
    )
    gate, up = x.double().chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    found = moqext_torch.silu_and_mul(x).double()
    torch.testing.assert_close(found, expected, rtol=max(2 * step, 2.0**-18), atol=1e-6)
    heads, angles = normal(rng, 2, 3, 4, 16, dtype=dtype), normal(rng, 1, 3, 16, dtype=dtype)
    low, high = heads.chunk(2, -1)
    expected = heads * angles[:, :, None] + torch.cat((-high, low), -1) * angles.flip(-1)[:, :, None]
    assert moqext_torch.rotary_embedding(heads, angles, angles.flip(-1)).equal(expected)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_and_exported(rng, name):
    function, operation, args = calls(rng)[name]

    class Call(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    compiled = torch.compile(Call(), fullgraph=True, backend="aot_eager")
    assert same(compiled(*args), function(*args))
    program = torch.export.export(Call(), args)
    assert operation in {node.target for node in program.graph.nodes}
    assert same(program.module()(*args), function(*args))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_refused(rng, name):
    function, operation, args = calls(rng)[name]
    expected = function(*args)
    wanting = tuple(arg.clone().requires_grad_() if isinstance(arg, torch.Tensor) else arg for arg in args)
    for call in (function, operation):
        with pytest.raises(RuntimeError, match="no gradient"):
            call(*wanting)
        with torch.no_grad():
            assert same(call(*wanting), expected)


def test_fake_and_transformed_tensors_go_through_the_dispatcher(rng):
    x = normal(rng, 3, 64)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = moqext_torch.silu_and_mul(mode.from_tensor(x))
    assert (type(fake).__name__, fake.shape) == ("FakeTensor", (3, 32))
    meta = moqext_torch.rms_norm(x.to("meta"), torch.empty(64, device="meta"), 1e-5, x.to("meta"))
    assert [each.shape for each in meta] == [(3, 64), (3, 64)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_device(rng, name):
    function, operation, args = calls(rng)[name]
    there = tuple(arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args)
    results, expected = function(*there), function(*args)
    found = tuple(each.cpu() for each in results) if isinstance(results, tuple) else results.cpu()
    assert same(found, expected)
    assert same(operation(*there), results)
    torch.library.opcheck(operation, there)


def test_numpy_and_torch_agree(rng):
    x = normal(rng, 4, 64, dtype=torch.float32)
    assert torch.from_numpy(ops.silu_and_mul(x.numpy())).equal(moqext_torch.silu_and_mul(x))
