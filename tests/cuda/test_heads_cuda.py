"""`qk_norm_rope` on a device has the bits of `rms_norm` and then `rotary_embedding` on the CPU."""

import pytest

from moqext import ops

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]
EPS = 1e-6


def normal(rng, *shape, dtype=torch.bfloat16):
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def make_table(rng, positions, width, dtype):
    angles = torch.from_numpy(rng.uniform(-3, 3, (positions, width // 2)))
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def expected(x, positions, table, heads, weights):
    """Computes on the CPU what is to become of x."""
    width, found = table.shape[1], x.clone()
    cos, sin = (part.repeat(1, 2)[None] for part in table[positions].split(width // 2, -1))
    begin = 0
    for count, weight in zip(heads, weights, strict=True):
        part = x[:, begin : begin + count * width].reshape(1, len(x), count, width)
        if weight is not None and part.numel():
            part = ops.rms_norm(part, weight, EPS)
        if part.numel():
            turned = ops.rotary_embedding(part, cos, sin)
            found[:, begin : begin + count * width] = turned.reshape(len(x), count * width)
        begin += count * width
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize("tokens", [1, 3, 16, 129])
@pytest.mark.parametrize("heads", [(32, 4), (1, 0), (0, 1), (5, 2)])
@pytest.mark.parametrize("normed", ["both", "none", "q"])
def test_bits(rng, dtype, width, tokens, heads, normed):
    columns = sum(heads) * width
    rows = normal(rng, tokens, columns + 2 * width, dtype=dtype)
    x = rows[:, : columns + width]  # with a v that stays, and a stride
    positions = torch.from_numpy(rng.integers(0, 40, tokens))
    table = make_table(rng, 40, width, dtype)
    weights = [normal(rng, width, dtype=dtype) for _ in range(2)]
    weights = [weight if normed in ("both", "qk"[i]) else None for i, weight in enumerate(weights)]
    there = rows.cuda()
    found = ops.qk_norm_rope(
        there[:, : columns + width],
        positions.cuda(),
        table.cuda(),
        *heads,
        q_weight=None if weights[0] is None else weights[0].cuda(),
        k_weight=None if weights[1] is None else weights[1].cuda(),
        eps=EPS,
    )
    assert found.cpu().equal(expected(x, positions, table, heads, weights))
    assert there[:, columns + width :].cpu().equal(rows[:, columns + width :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize("heads", [(32, 4), (1, 1), (0, 3), (5, 2)])
@pytest.mark.parametrize("layout", ["beside", "apart"])
def test_k_and_v_are_stored(rng, dtype, width, heads, layout):
    tokens, blocks, block_size, keys = 21, 5, 16, heads[1]
    x = normal(rng, tokens, (heads[0] + 2 * keys) * width, dtype=dtype)
    table, weights = make_table(rng, 40, width, dtype), [normal(rng, width, dtype=dtype) for _ in range(2)]
    positions = torch.from_numpy(rng.integers(0, 40, tokens))
    slots = torch.from_numpy(rng.permutation(blocks * block_size)[: tokens - 2])
    slots[[3, 7, 8]] = torch.tensor([-1, blocks * block_size, 1 << 40])
    if layout == "beside":
        pages = normal(rng, blocks, keys, block_size, 2 * width, dtype=dtype)
        cache = pages.cuda()
        there = cache.transpose(1, 2).split(width, -1)
        k_cache, v_cache = pages.transpose(1, 2).split(width, -1)
    else:
        pages = normal(rng, 2, blocks, block_size, keys, width, dtype=dtype)
        cache = pages.cuda()
        there, (k_cache, v_cache) = cache.unbind(), pages.unbind()
    found = ops.qk_norm_rope(
        x.cuda(),
        positions.cuda(),
        table.cuda(),
        *heads,
        q_weight=weights[0].cuda(),
        k_weight=weights[1].cuda(),
        eps=EPS,
        k_cache=there[0],
        v_cache=there[1],
        slots=slots.cuda(),
    )
    turned = expected(x, positions, table, heads, weights)
    assert found.cpu().equal(turned)
    k, v = turned[:, heads[0] * width :].reshape(tokens, 2, keys, width).unbind(1)
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < blocks * block_size:
            k_cache[slot // block_size, slot % block_size] = k[token]
            v_cache[slot // block_size, slot % block_size] = v[token]
    assert cache.cpu().equal(pages)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"slots": None}, ValueError, "all or none"),
        ({"v_cache": None}, ValueError, "all or none"),
        ({"k_cache": (2, 4, 2, 128)}, ValueError, "k_cache: expected shape"),
        ({"v_cache": (3, 4, 1, 128)}, ValueError, "shape of k_cache"),
        ({"slots": (5,)}, ValueError, "at most 4"),
        ({"x": (4, 256)}, ValueError, "at least 384 values"),
    ],
)
def test_refusals_of_caches(rng, change, error, text):
    shapes = {"x": (4, 384), "k_cache": (2, 4, 1, 128), "v_cache": (2, 4, 1, 128), "slots": (4,)} | change
    made = {name: None if shape is None else normal(rng, *shape).cuda() for name, shape in shapes.items()}
    if made["slots"] is not None:
        made["slots"] = made["slots"].long()
    positions = torch.zeros(4, dtype=torch.int64, device="cuda")
    table = make_table(rng, 7, 128, torch.bfloat16).cuda()
    with pytest.raises(error, match=text):
        ops.qk_norm_rope(made.pop("x"), positions, table, 1, 1, **made)


def test_positions_beyond_the_table_have_its_last_row(rng):
    x, table = normal(rng, 3, 256).cuda(), make_table(rng, 7, 128, torch.bfloat16).cuda()
    far = ops.qk_norm_rope(x.clone(), torch.tensor([6, 7, 1 << 40], device="cuda"), table, 1, 1)
    last = ops.qk_norm_rope(x.clone(), torch.tensor([6, 6, 6], device="cuda"), table, 1, 1)
    assert far.equal(last)


def test_no_tokens(rng):
    x, table = normal(rng, 0, 256).cuda(), make_table(rng, 7, 128, torch.bfloat16).cuda()
    assert ops.qk_norm_rope(x, torch.zeros(0, dtype=torch.int64, device="cuda"), table, 1, 1) is x


def test_in_a_graph(rng):
    x, table = normal(rng, 4, 384).cuda(), make_table(rng, 7, 128, torch.bfloat16).cuda()
    positions, given = torch.arange(4, device="cuda"), x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.qk_norm_rope(x, positions, table, 1, 1)
    assert x.equal(given)
    graph.replay()
    torch.cuda.synchronize()
    assert x.equal(ops.qk_norm_rope(given, positions, table, 1, 1))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"x": (4, 255)}, ValueError, "at least 256 values"),
        ({"table": (7, 96)}, ValueError, "32, 64, 128 or 256"),
        ({"table": (0, 128)}, ValueError, "32, 64, 128 or 256"),
        ({"positions": (5,)}, ValueError, "positions"),
        ({"q_weight": (64,)}, ValueError, "q_weight"),
    ],
)
def test_refusals(rng, change, error, text):
    shapes = {"x": (4, 384), "table": (7, 128), "q_weight": (128,)} | change
    made = {name: normal(rng, *shape).cuda() for name, shape in shapes.items() if name != "positions"}
    positions = torch.zeros(shapes.get("positions", (4,)), dtype=torch.int64, device="cuda")
    with pytest.raises(error, match=text):
        ops.qk_norm_rope(made["x"], positions, made["table"], 1, 1, q_weight=made["q_weight"])


def test_refusals_of_dtypes_and_devices(rng):
    x, table = normal(rng, 4, 384).cuda(), make_table(rng, 7, 128, torch.bfloat16).cuda()
    positions = torch.zeros(4, dtype=torch.int64, device="cuda")
    with pytest.raises(TypeError, match="x: expected bfloat16"):
        ops.qk_norm_rope(x.float(), positions, table, 1, 1)
    with pytest.raises(TypeError, match="positions: expected int64"):
        ops.qk_norm_rope(x, positions.int(), table, 1, 1)
    with pytest.raises(TypeError, match="table: expected bfloat16"):
        ops.qk_norm_rope(x, positions, table.half(), 1, 1)
    with pytest.raises(ValueError, match="at least one head"):
        ops.qk_norm_rope(x, positions, table, 0, 0)
    with pytest.raises(ValueError, match="eps"):
        ops.qk_norm_rope(x, positions, table, 1, 1, eps=-1.0)
    with pytest.raises(ValueError, match="multiples of 16"):
        ops.qk_norm_rope(x.view(-1)[1 : 1 + 3 * 384].view(3, 384), positions[:3], table, 1, 1)
    with pytest.raises((ValueError, BufferError), match="positions"):
        ops.qk_norm_rope(x, positions.cpu(), table, 1, 1)
