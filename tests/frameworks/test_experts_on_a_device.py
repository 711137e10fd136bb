"""Experts on a CUDA device: as modules of torch and in models of Transformers, in graphs, without a wait."""

import copy
from contextlib import contextmanager

import numpy as np
import pytest

import moqext
from moqext import reference

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="5.16")

from moqext.tools.expert_slack import expert_slack, rounds_d, sums_in_cores  # noqa: E402
from moqext_torch import QuantMoE  # noqa: E402
from moqext_torch.moe_op import ROLES  # noqa: E402

from ..moe_cases import COMPUTES  # noqa: E402
from .greedy import GREEDY  # noqa: E402
from .test_transformers_experts import GENUINE, heard, random_ids, reference_moe, separate  # noqa: E402
from .torch_moe_cases import filled_moe, moe_case, random_call, stacks_of  # noqa: E402

pytestmark = pytest.mark.gpu

LAYOUTS = [
    {},
    {"bias": "bfloat16"},
    {"interleaved": True, "activation": "swigluoai", "bias": "float32"},
    {"gated": False, "activation": "relu2"},
]


@contextmanager
def no_wait():
    """An error where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def to_cuda(call):
    return [tensor.cuda() for tensor in call]


def as_numbers(tensor):
    """Makes tensors comparable by value: float8 as bytes, without the sign of zero, which packing drops."""
    tensor = tensor.cpu()
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor
    codes = tensor.view(torch.uint8)
    return codes.where(codes != 0x80, torch.zeros_like(codes))


def assert_near(y, case, call, layer):
    """Beside the reference, where a rounding between the projections may go either way."""
    x, weights, ids = (tensor.cpu() for tensor in call)
    method = layer.method
    expected = case.expected(x, weights, ids, compute=method.compute)
    kernel = method.backend_for(x.numel() // x.shape[-1])
    options = {"quant_algo": case.algo, "compute": method.compute, **case.options}
    options |= {"in_cores": sums_in_cores(kernel), "rounded": rounds_d(kernel, method.dtype)}
    flat = [x.float().numpy().reshape(-1, x.shape[-1])]
    flat += [tensor.numpy().reshape(-1, tensor.shape[-1]) for tensor in (weights, ids)]
    slack = expert_slack(flat[0], case.stacks, flat[1], flat[2], **options).reshape(expected.shape)
    apart = np.maximum(np.abs(y.cpu().float().numpy() - expected) - slack, 0)
    assert np.linalg.norm(apart) <= 2.5e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("algo, compute", COMPUTES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@torch.no_grad()
def test_states_moves_graphs_and_reloads(rng, algo, compute, layout):
    if layout.get("interleaved") and algo == "FP8_PB_WO":
        pytest.skip("rows in blocks do not take turns")
    first, second = moe_case(rng, algo, **layout), moe_case(rng, algo, **layout)
    layer = filled_moe(first, compute=compute).to("cuda").prepare()
    stored = stacks_of(first)
    for role, tensor in layer.state_dict().items():
        assert tensor.is_cuda
        assert as_numbers(tensor).equal(as_numbers(stored[role])), role
    call = to_cuda(random_call(rng, 9, kind="hostile"))
    with no_wait():
        y = layer(*call)
    assert_near(y, first, call, layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(*call)
    for kind in ("random", "one", "skewed", "duplicates"):  # other counts of rows for every expert
        for held, fresh in zip(call, to_cuda(random_call(rng, 9, kind=kind)), strict=True):
            held.copy_(fresh)
        captured.fill_(float("nan"))
        graph.replay()
        assert captured.equal(layer(*call))
    layer.load_state_dict(stacks_of(second))
    graph.replay()
    assert captured.equal(layer(*call))
    assert_near(captured, second, call, layer)


@torch.no_grad()
def test_torch_compile_and_the_operation(rng):
    layer = filled_moe(moe_case(rng, "NVFP4"), compute="auto").to("cuda").prepare()
    call = to_cuda(random_call(rng, 5))
    tensors = [layer._prepared_tensor(role) for role in ROLES]
    torch.library.opcheck(torch.ops.moqext.moe.default, (*call, None, False, *tensors, *layer.description))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert compiled(*call).equal(layer(*call))


@torch.no_grad()
def test_back_to_the_host(rng):
    case = moe_case(rng, "NVFP4", bias="bfloat16")
    layer = filled_moe(case).to("cuda").prepare()
    assert copy.deepcopy(layer).method is layer.method
    call = random_call(rng, 4)
    there = layer(*to_cuda(call))
    assert_near(there, case, call, layer)
    assert filled_moe(case)(*call).equal(layer.cpu()(*call))


@torch.no_grad()
def test_a_share_of_the_experts(rng):
    """Two devices' worth of experts on one, by maps: the sum is the whole layer's."""
    case = moe_case(rng, "FP8_PER_CHANNEL_PER_TOKEN")
    whole = filled_moe(case, dtype=torch.float32).to("cuda")
    x, weights, ids = to_cuda(random_call(rng, 7, dtype=torch.float32, kind="hostile"))
    expected = whole(x, weights, ids)
    total = torch.zeros_like(expected)
    for here in ([0, 3], [1, 2]):
        about = dict(
            zip(("quant_algo", "num_experts", "hidden_size", "intermediate_size"), case.about, strict=True)
        )
        part = QuantMoE(**about | {"num_experts": 2}, top_k=2, global_num_experts=4, dtype=torch.float32)
        part.load_state_dict({role: stack[here] for role, stack in stacks_of(case).items()})
        local = torch.full((4,), -1, dtype=torch.int32)
        local[here] = torch.arange(2, dtype=torch.int32)
        total += part.to("cuda")(x, weights, ids, local.cuda())
    assert float((total - expected).norm()) <= 1e-5 * float(expected.norm())


@pytest.mark.parametrize("directory", GENUINE)
@torch.no_grad()
def test_models_of_transformers(rng, data, directory, tmp_path):
    """Experts for their own inputs as the reference has them; the checkpoint's bytes when it is saved."""
    model = separate(data / directory, dtype=torch.float32, device_map="cuda")
    with moqext.Checkpoint(data / directory) as ckpt:
        records = {record.name: record for record in ckpt.layers() if record.kind == "moe"}
        _, calls = heard(model, random_ids(rng, model, 2, 9).cuda())
        experts = {
            name: call for name, call in calls.items() if isinstance(model.get_submodule(name), QuantMoE)
        }
        assert len(experts) == len(records)
        for (args, kwargs, y), record in zip(experts.values(), records.values(), strict=True):
            expected = reference_moe(ckpt, record, [tensor.cpu() for tensor in args], kwargs)
            apart = np.linalg.norm(y.cpu().double().numpy() - expected) / np.linalg.norm(expected)
            assert apart <= 2.5e-3, record.name
    model.save_pretrained(tmp_path)
    with moqext.Checkpoint(data / directory) as before, moqext.Checkpoint(tmp_path) as after:
        for name in before.tensors:
            was, now = before.tensor(name), after.tensor(name)
            if was.dtype != now.dtype:  # what is not quantized was loaded as float32
                assert np.array_equal(reference.as_float32(now), reference.as_float32(was)), name
            elif not name.endswith("weight_scale"):  # packing drops the sign of a zero scale
                assert now.tobytes() == was.tobytes(), name


@pytest.mark.parametrize("name", ["qwen3moe_fp8", "qwen3moe_nvfp4"])
@torch.no_grad()
def test_a_decoding_step_in_a_graph(rng, data, name):
    """One token over a static cache: the router sends other tokens to other experts of the same graph."""
    import moqext_transformers

    model = moqext_transformers.from_pretrained(data / "checkpoints" / name, device_map="cuda")
    ids = random_ids(rng, model, 2, 7).cuda()
    generated = model.generate(ids, **GREEDY, disable_compile=True)
    assert generated.equal(model.generate(ids, **GREEDY, disable_compile=True))
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    model(ids, past_key_values=cache, use_cache=True)
    token, place = ids[:, :1].clone(), torch.tensor([[7]], device="cuda")
    mask = (torch.arange(16, device="cuda") <= 7).expand(2, 1, 1, 16)
    step = {"position_ids": place, "past_key_values": cache, "use_cache": True, "attention_mask": mask}

    def run():
        for layer in cache.layers:
            layer.cumulative_length.fill_(7)
        return model(token, **step).logits

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()
    for other in random_ids(rng, model, 3, 2, 1).cuda():
        token.copy_(other)
        logits.fill_(float("nan"))
        graph.replay()
        assert logits.equal(run())
