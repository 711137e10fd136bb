"""`moqext.route` on CUDA tensors: ids and weights have the bits of the CPU and of the reference."""

import numpy as np
import pytest

import moqext
from moqext import reference

from ..test_route import SCORINGS, logits_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

KINDS = ["normal", "wide", "tied", "near", "special"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODELS = {  # experts, top_k and options
    "mixtral": (8, 2, {"scoring": "softmax", "renormalize": True}),
    "qwen2": (60, 4, {"scoring": "softmax"}),
    "qwen3": (128, 8, {"scoring": "softmax", "renormalize": True}),
    "qwen3-next": (512, 10, {"scoring": "softmax", "renormalize": True}),
    "gpt-oss": (32, 4, {"scoring": "topk_softmax"}),
    "llama4": (128, 1, {"scoring": "sigmoid"}),
    "deepseek-v2": (
        160,
        6,
        {"scoring": "softmax", "num_groups": 8, "topk_groups": 3, "routed_scaling_factor": 16.0},
    ),
    "deepseek-v3": (
        256,
        8,
        {
            "scoring": "sigmoid",
            "renormalize": True,
            "num_groups": 8,
            "topk_groups": 4,
            "correction_bias": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "deepseek-v4": (
        384,
        6,
        {
            "scoring": "sqrtsoftplus",
            "renormalize": True,
            "correction_bias": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "nemotron": (512, 22, {"scoring": "sigmoid", "renormalize": True, "correction_bias": True}),
}


def on_gpu(x, dtype="float32"):
    """A tensor on the device."""
    return torch.from_numpy(np.ascontiguousarray(x)).to(DTYPES[dtype]).cuda()


def same(got, expected):
    """Equal bits; the payload of a NaN is left open."""
    weights, ids = (value.cpu() for value in got)
    expected_weights, expected_ids = (torch.as_tensor(value).cpu() for value in expected)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert torch.equal(ids, expected_ids)
    alike = weights.view(torch.int32) == expected_weights.view(torch.int32)
    assert bool((alike | (weights.isnan() & expected_weights.isnan())).all())


def compare(x, top_k, **options):
    """One call on the device, into poisoned results, beside the same on the CPU."""
    shape = (*x.shape[:-1], top_k)
    out = (
        torch.full(shape, 7e9, dtype=torch.float32, device="cuda"),
        torch.full(shape, -7, dtype=torch.int32, device="cuda"),
    )
    got = moqext.route(x, top_k, **options, out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    host = {name: value.cpu() if hasattr(value, "cpu") else value for name, value in options.items()}
    same(got, moqext.route(x.cpu(), top_k, **host))


def of_model(rng, name, tokens, kind="normal"):
    """Arguments of a call as the model makes it."""
    experts, top_k, options = MODELS[name]
    options = dict(options)
    if options.get("correction_bias"):
        options["correction_bias"] = on_gpu(rng.standard_normal(experts))
    return on_gpu(logits_of(kind, rng, (tokens, experts))), top_k, options


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_models(rng, name, kind):
    for tokens in (1, 2, 5, 130):
        x, top_k, options = of_model(rng, name, tokens, kind)
        for dtype in DTYPES.values():
            compare(x.to(dtype), top_k, **options)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_anything(rng, scoring):
    """Numbers of experts around those that a lane more takes, groups of every size, hostile values."""
    for _ in range(60):
        groups = int(rng.choice([1, 1, 2, 3, 8, 24, 40, 100]))
        size = int(rng.integers(1, 1024 // groups + 1) if rng.integers(2) else rng.integers(1, 7))
        if groups == 1:
            size = int(rng.choice([1, 2, 31, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1024]))
        kept = int(rng.integers(1, groups + 1))
        biased = scoring != "topk_softmax" and rng.integers(2)
        bias = logits_of(rng.choice(["normal", "tied", "special"]), rng, groups * size)
        x = logits_of(rng.choice(KINDS), rng, (int(rng.integers(0, 70)), groups * size))
        with np.errstate(over="ignore"):
            compare(
                on_gpu(x, str(rng.choice(list(DTYPES)))),
                int(rng.integers(1, min(32, kept * size) + 1)),
                scoring=scoring,
                renormalize=bool(rng.integers(2)),
                num_groups=groups,
                topk_groups=kept,
                correction_bias=on_gpu(bias, str(rng.choice(list(DTYPES)))) if biased else None,
                routed_scaling_factor=float(rng.choice([1.0, 2.5, 0.1, 1e-30])),
            )


def test_the_reference(rng):
    """Without the CPU's code between."""
    for name in MODELS:
        x, top_k, options = of_model(rng, name, 33)
        expected = reference.route(
            x.cpu().numpy(),
            top_k,
            **{
                key: value.cpu().numpy() if torch.is_tensor(value) else value
                for key, value in options.items()
            },
        )
        same(moqext.route(x, top_k, **options), expected)


def test_many_tokens(rng):
    for name in ("qwen3", "deepseek-v3"):
        x, top_k, options = of_model(rng, name, 65536)
        compare(x.bfloat16(), top_k, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(rng, dtype):
    whole = on_gpu(rng.standard_normal((6, 10, 40)), dtype)
    bias = on_gpu(rng.standard_normal(80), dtype)[::2]
    for x in (
        whole[::2],
        whole[:, 1::3],
        whole.transpose(0, 1),
        whole[0, 0].expand(5, 40),
        whole[0, 0],
        torch.cat([whole, whole], -1)[..., ::2],
    ):
        compare(x, 4, scoring="sigmoid", correction_bias=bias)
        compare(x, 4, scoring="softmax", num_groups=5, topk_groups=2)
    x = whole.permute(2, 1, 0)
    compare(x, 3, scoring="softmax")
    compare(whole[:0], 3, scoring="softmax")


def test_only_results_are_written(rng):
    x = on_gpu(rng.standard_normal((5, 64)))
    weights = torch.full((7, 6), 7e9, device="cuda")
    ids = torch.full((7, 6), -7, dtype=torch.int32, device="cuda")
    moqext.route(x, 6, scoring="softmax", out=(weights[1:6], ids[1:6]))
    for memory, poison in ((weights, 7e9), (ids, -7)):
        assert bool((memory[[0, 6]] == poison).all())
        assert not bool((memory[1:6] == poison).any())


def test_a_graph_replays(rng):
    """The logits of a call are what a call before made: a kernel that is launched early has to wait."""
    experts, top_k, options = MODELS["deepseek-v3"]
    options = options | {"correction_bias": on_gpu(rng.standard_normal(experts))}
    x = on_gpu(rng.standard_normal((9, experts)))
    spread = on_gpu(rng.standard_normal(experts) * 3)

    def chain(x):
        results = []
        for _ in range(6):
            results.append(moqext.route(x, top_k, **options))
            x = results[-1][0].repeat(1, experts // top_k) * spread
        return [value for pair in results for value in pair]

    chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = chain(x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        for result in results:
            result.fill_(-7)
        graph.replay()
        for got, wanted in zip(results, chain(x), strict=True):
            assert torch.equal(got, wanted)
        same(
            results[:2],
            moqext.route(x.cpu(), top_k, **options | {"correction_bias": options["correction_bias"].cpu()}),
        )


def test_a_stream_of_its_own(rng):
    x, top_k, options = of_model(rng, "qwen3", 64)
    expected = moqext.route(x, top_k, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    got = moqext.route(x, top_k, **options, stream=stream.cuda_stream)
    stream.synchronize()
    same(got, expected)


def test_what_does_not_fit_is_named(rng):
    x, bias = on_gpu(rng.standard_normal((3, 16))), torch.zeros(16)
    with pytest.raises(BufferError, match=r"^correction_bias: "):
        moqext.route(x, 2, scoring="sigmoid", correction_bias=bias)
    out = torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(BufferError, match=r"^out\[0\]: "):
        moqext.route(x, 2, scoring="sigmoid", out=out)
    with pytest.raises(ValueError, match=r"^top_k: expected 1 to 16"):
        moqext.route(x, 17, scoring="sigmoid")


def test_tokens_that_are_padding_have_no_experts(rng):
    for tokens in (1, 5, 200):
        x, padding = on_gpu(rng.standard_normal((tokens, 128))), torch.from_numpy(rng.random(tokens) < 0.5)
        compare(x, 8, scoring="softmax", renormalize=True, padding=padding.cuda())
