"""torch.ops.moqext.linear: what torch.compile, torch.export, torch.func and autograd see of a layer."""

import copy

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

from moqext_torch.op import find_method  # noqa: E402

from .torch_cases import ALGOS, case_of, filled, random_x  # noqa: E402

fw = torch.autograd.forward_ad


def arguments(layer, x):
    """Arguments that the layer gives the operation; float8 as bytes, which opcheck can compare."""
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func, args))
            return func(*args, **(kwargs or {}))

    with Spy():
        layer(x)
    args = next(args for func, args in seen if func is torch.ops.moqext.linear.default)
    is_float8 = lambda arg: isinstance(arg, torch.Tensor) and arg.dtype == torch.float8_e4m3fn  # noqa: E731
    return tuple(arg.view(torch.uint8) if is_float8(arg) else arg for arg in args)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("algo", ALGOS)
def test_opcheck(rng, algo):
    case = case_of(rng, algo)
    layer = filled(case, torch.ones(40)).prepare()
    x = random_x(rng, case, 3)
    args = arguments(layer, x)
    assert torch.ops.moqext.linear(*args).equal(layer(x))
    torch.library.opcheck(torch.ops.moqext.linear.default, args)
    torch.library.opcheck(torch.ops.moqext.linear.default, (random_x(rng, case, 2, 0), *args[1:]))


@pytest.mark.parametrize("algo", ["FP8", "FP8_PB_WO", "NVFP4"])
def test_export_with_any_number_of_tokens(rng, algo):
    case = case_of(rng, algo)
    layer = filled(case, torch.ones(40)).prepare()
    x = random_x(rng, case, 2, 5)
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    program = torch.export.export(layer, (x,), dynamic_shapes={"x": {1: tokens}})
    run = program.module()
    for count in (1, 5, 33):
        x = random_x(rng, case, 2, count)
        assert run(x).equal(layer(x))


def test_compiled_equals_eager(rng):
    first, second = case_of(rng, "NVFP4", (128,)), case_of(rng, "FP8", (16,))
    model = torch.nn.Sequential(filled(first, torch.ones(128)), torch.nn.ReLU(), filled(second))
    x = random_x(rng, first, 4)
    with pytest.raises(Exception, match=r"call prepare\(\) before torch.compile"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    for layer in (model[0], model[2]):
        layer.prepare()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (4, 7, 1):
        x = random_x(rng, first, count)
        assert compiled(x).equal(model(x))
    with torch.inference_mode():
        assert compiled(x).equal(model(x))


@pytest.mark.slow
def test_compiled_by_inductor_equals_eager(rng):
    case = case_of(rng, "NVFP4", (128,))
    layer, x = filled(case).prepare(), random_x(rng, case, 4)
    assert torch.compile(lambda x: layer(x) + 1, fullgraph=True)(x).equal(layer(x) + 1)


def test_a_reload_reaches_a_compiled_model(rng):
    first, second = case_of(rng, "NVFP4"), case_of(rng, "NVFP4")
    layer, x = filled(first).prepare(), random_x(rng, first, 4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(x)
    layer.load_state_dict(filled(second).state_dict())
    assert compiled(x).equal(filled(second)(x))


def test_forward_gradients_are_refused(rng):
    case = case_of(rng, "NVFP4")
    layer, x = filled(case, torch.ones(40)).prepare(), random_x(rng, case, 2)
    words = "gradients of x and of their bias, backward and once, and no others"
    with pytest.raises(RuntimeError, match=words), fw.dual_level():
        layer(fw.make_dual(x, x))
    with pytest.raises(RuntimeError, match=words):
        torch.func.jvp(layer, (x,), (x,))
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert layer(torch.nn.Parameter(x)).equal(layer(x))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["meta", "sparse_coo", "sparse_csr", "nested", "jagged"])
def test_tensors_without_dense_memory_are_refused(rng, kind):
    """By name, instead of by a page of frames of torch."""
    case = case_of(rng, "FP8")
    layer, x = filled(case).prepare(), random_x(rng, case, 2)
    given = {
        "meta": lambda: x.to("meta"),
        "sparse_coo": x.to_sparse,
        "sparse_csr": x.to_sparse_csr,
        "nested": lambda: torch.nested.nested_tensor([x, x]),
        "jagged": lambda: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    }[kind]()
    with pytest.raises(TypeError, match=r"^x: expected a dense tensor in memory, got one that is") as caught:
        layer(given)
    assert len(str(caught.value)) < 100


def test_watched_calls_go_through_the_dispatcher(rng):
    """Fake tensors, transforms and traces see one operation; results are those of a plain call."""
    case = case_of(rng, "NVFP4")
    layer, x = filled(case).prepare(), random_x(rng, case, 6)
    expected = torch.stack([layer(rows) for rows in x.reshape(3, 2, -1)])  # as vmap calls it
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = layer(mode.from_tensor(x))
    assert (type(fake).__name__, fake.shape, fake.dtype) == ("FakeTensor", (6, 40), torch.bfloat16)
    assert torch.func.vmap(layer)(x.reshape(3, 2, -1)).equal(expected)
    trace = torch.jit.trace(layer, x)
    other = random_x(rng, case, 2)
    assert trace(other).equal(layer(other))
    graph = torch.fx.experimental.proxy_tensor.make_fx(layer)(x)
    assert torch.ops.moqext.linear.default in {node.target for node in graph.graph.nodes}


def test_meta_tensors_have_shapes(rng):
    layer = filled(case_of(rng, "NVFP4")).prepare()
    args = arguments(layer, torch.zeros(2, 128, dtype=torch.bfloat16))
    args = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
    assert torch.ops.moqext.linear(*args).shape == (2, 40)


def test_copies_share_what_was_tuned(rng):
    case = case_of(rng, "NVFP4")
    layer = filled(case)
    assert layer.tune([1])
    assert copy.deepcopy(layer).method is layer.method


def test_layers_find_the_cache_of_moqext_tune(rng, tmp_path, monkeypatch):
    monkeypatch.setenv("MOQEXT_TUNE", str(tmp_path / "tune.json"))
    case = case_of(rng, "NVFP4", (24, 8))
    filled(case).tune([3], save=True)
    find_method.cache_clear()  # as another process would
    layer = filled(case).prepare()
    assert "chosen, tuned" in layer.method.explain(3)
    assert "tuned" not in layer.method.explain(8)
    find_method.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["exact", "auto", "fp8"])
@pytest.mark.parametrize("algo", ALGOS)
def test_graphs_moves_and_states_on_a_device(rng, algo, compute):
    """A CUDA graph equals eager calls, a reload reaches it, and the checkpoint's tensors come back."""
    if compute == "fp8" and "FP4" not in algo:
        pytest.skip("compute 'fp8' is for NVFP4 weights")
    first, second = (case_of(rng, algo, (128, 64), 256) for _ in range(2))
    host = filled(first, torch.ones(192), compute=compute)
    before = {role: tensor.clone() for role, tensor in host.state_dict().items()}
    layer = copy.deepcopy(host).to("cuda").prepare()
    x = random_x(rng, first, 8).cuda()
    y = layer(x)
    for role, tensor in layer.state_dict().items():
        kept = tensor.cpu().view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor.cpu()
        given = before[role]
        if given.dtype == torch.float8_e4m3fn:
            given = given.view(torch.uint8)
            if role == "weight_scale":  # packing drops the sign of zero
                given, kept = (t.where(t != 0x80, torch.zeros_like(t)) for t in (given, kept))
        assert kept.equal(given), role
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer(x)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    graph.replay()
    torch.cuda.synchronize()
    assert captured.equal(y)
    layer.load_state_dict(filled(second, torch.zeros(192)).state_dict())
    graph.replay()
    torch.cuda.synchronize()
    assert captured.equal(layer(x))
    torch.library.opcheck(torch.ops.moqext.linear.default, arguments(layer, x))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert compiled(x).equal(layer(x))
    if compute != "fp8":
        expected = layer(x).cpu().float()
        found = layer.cpu()(x.cpu()).float()
        assert (found - expected).norm() <= 2 * 2.5e-3 * expected.norm()
