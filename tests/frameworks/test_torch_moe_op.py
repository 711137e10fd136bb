"""torch.ops.moqext.moe: what torch.compile, torch.export, torch.func and autograd see of experts."""

import pytest

import moqext

from ..moe_cases import ALGOS

torch = pytest.importorskip("torch", minversion="2.10")

from .torch_moe_cases import HIDDEN, TOP_K, filled_moe, moe_case, random_call, stacks_of  # noqa: E402

fw = torch.autograd.forward_ad
SWIGLU = {"interleaved": True, "activation": "swigluoai", "bias": "bfloat16", "limit": 5.0}
LAYERS = [(algo, {}) for algo in ALGOS] + [
    ("FP8", SWIGLU),
    ("NVFP4", {"gated": False, "activation": "relu2"}),
]


def arguments(layer, *call):
    """Arguments that the layer gives the operation; float8 as bytes, which opcheck can compare."""
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func, args))
            return func(*args, **(kwargs or {}))

    with Spy():
        layer(*call)
    args = next(args for func, args in seen if func is torch.ops.moqext.moe.default)
    is_float8 = lambda arg: isinstance(arg, torch.Tensor) and arg.dtype == torch.float8_e4m3fn  # noqa: E731
    return tuple(arg.view(torch.uint8) if is_float8(arg) else arg for arg in args)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("algo, layout", LAYERS)
def test_opcheck(rng, algo, layout):
    layer = filled_moe(moe_case(rng, algo, **layout)).prepare()
    call = random_call(rng, 3)
    args = arguments(layer, *call)
    assert torch.ops.moqext.moe(*args).equal(layer(*call))
    torch.library.opcheck(torch.ops.moqext.moe.default, args)
    torch.library.opcheck(torch.ops.moqext.moe.default, (*random_call(rng, 2, 0), *args[3:]))


@pytest.mark.parametrize("algo, layout", LAYERS)
def test_export_with_any_number_of_tokens(rng, algo, layout):
    layer = filled_moe(moe_case(rng, algo, **layout)).prepare()
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    shapes = {"x": {0: tokens}, "topk_weights": {0: tokens}, "topk_ids": {0: tokens}}
    program = torch.export.export(layer, random_call(rng, 5), dynamic_shapes=shapes)
    run = program.module()
    for count in (1, 5, 33):
        call = random_call(rng, count)
        assert run(*call).equal(layer(*call))


class Routed(torch.nn.Module):
    """A router of torch's own before the experts, and something after them."""

    def __init__(self, moe):
        super().__init__()
        self.router = torch.nn.Linear(HIDDEN, moe.description.num_experts, dtype=torch.bfloat16)
        self.moe = moe

    def forward(self, x):
        weights, ids = self.router(x).float().softmax(dim=-1).topk(TOP_K, dim=-1)
        return torch.relu(self.moe(x, weights, ids)) + x


def test_compiled_equals_eager(rng):
    model = Routed(filled_moe(moe_case(rng, "NVFP4", bias="bfloat16"))).requires_grad_(False)
    x = random_call(rng, 4)[0]
    with pytest.raises(Exception, match=r"call prepare\(\) before torch.compile"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    model.moe.prepare()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (4, 7, 1):
        x = random_call(rng, count)[0]
        assert compiled(x).equal(model(x))
    with torch.inference_mode():
        assert compiled(x).equal(model(x))


@pytest.mark.slow
def test_compiled_by_inductor_equals_eager(rng):
    layer, call = filled_moe(moe_case(rng, "NVFP4")).prepare(), random_call(rng, 4)
    assert torch.compile(lambda *call: layer(*call) + 1, fullgraph=True)(*call).equal(layer(*call) + 1)


def test_a_reload_reaches_a_compiled_model(rng):
    first, second = moe_case(rng, "NVFP4"), moe_case(rng, "NVFP4")
    layer, call = filled_moe(first).prepare(), random_call(rng, 4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    before = compiled(*call)
    layer.load_state_dict(stacks_of(second))
    assert compiled(*call).equal(filled_moe(second)(*call))
    assert not compiled(*call).equal(before)


def test_the_method_itself_refuses_gradients(rng):
    """Gradients of what results weigh are refused, too: a router learns from nothing else."""
    layer, (x, weights, ids) = filled_moe(moe_case(rng, "NVFP4")).prepare(), random_call(rng, 2)
    with pytest.raises(RuntimeError, match=r"^topk_weights: .* no gradient; pass topk_weights\.detach\(\)"):
        layer.method(x, layer._prepared, weights.requires_grad_(), ids)
    with pytest.raises(RuntimeError, match=r"^router_logits: .* no gradient"):
        moqext.route(torch.randn(2, 4, requires_grad=True), 2, scoring="softmax")


def test_weights_that_want_a_gradient_get_none(rng):
    layer, call = filled_moe(moe_case(rng, "FP8")).prepare(), random_call(rng, 2)
    expected = layer(*call)
    layer.requires_grad_(True)
    with pytest.raises(RuntimeError, match="no gradient"):
        layer(*call)
    with torch.no_grad():
        assert layer(*call).equal(expected)


@pytest.mark.parametrize("which", ["x", "weights"])
@pytest.mark.parametrize("traced", [False, True])
def test_gradients_are_refused(rng, traced, which):
    """Backward and forward, of what goes in and of what its results weigh."""
    layer, (x, weights, ids) = filled_moe(moe_case(rng, "NVFP4")).prepare(), random_call(rng, 2)
    given = x if which == "x" else weights
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if traced else layer

    def call(tensor):
        return run(tensor, weights, ids) if which == "x" else run(x, tensor, ids)

    words = r"no gradient: call them under torch.no_grad\(\)"
    with pytest.raises(Exception, match=words):
        call(given.clone().requires_grad_())
    if not traced:
        with pytest.raises(RuntimeError, match=words), fw.dual_level():
            call(fw.make_dual(given, given))
        with pytest.raises(RuntimeError, match=words):
            torch.func.jvp(call, (given,), (given,))
        with pytest.raises(RuntimeError, match=words):
            torch.func.grad(lambda tensor: call(tensor).sum())(given)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert call(torch.nn.Parameter(given)).equal(layer(x, weights, ids))


def test_watched_calls_go_through_the_dispatcher(rng):
    """Fake tensors and traces see one operation; results are those of a plain call."""
    layer, call = filled_moe(moe_case(rng, "NVFP4")).prepare(), random_call(rng, 6)
    folded = [tensor.reshape(3, 2, -1) for tensor in call]
    expected = torch.stack([layer(*part) for part in zip(*folded, strict=True)])  # as vmap calls it
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = layer(*(mode.from_tensor(tensor) for tensor in call))
    assert (type(fake).__name__, fake.shape, fake.dtype) == ("FakeTensor", (6, HIDDEN), torch.bfloat16)
    assert torch.func.vmap(layer)(*folded).equal(expected)
    trace = torch.jit.trace(layer, call)
    other = random_call(rng, 2)
    assert trace(*other).equal(layer(*other))
    graph = torch.fx.experimental.proxy_tensor.make_fx(layer)(*call)
    assert torch.ops.moqext.moe.default in {node.target for node in graph.graph.nodes}


def test_meta_tensors_have_shapes(rng):
    layer = filled_moe(moe_case(rng, "NVFP4")).prepare()
    args = [
        arg.to("meta") if isinstance(arg, torch.Tensor) else arg
        for arg in arguments(layer, *random_call(rng, 2))
    ]
    assert torch.ops.moqext.moe(*args).shape == (2, HIDDEN)


def test_layers_share_what_was_tuned(rng):
    first, second = (filled_moe(moe_case(rng, "NVFP4")) for _ in range(2))
    assert first.tune([1])
    assert second.method is first.method
