"""Weight processing on the device: the same bits, and the same refusals, as on the CPU."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from moqext import LinearMethod

from ..linear_cases import (
    COMPUTES,
    prepared_for_cuda,
    random_case,
    random_part,
    random_x,
    with_a_lost_scale,
    with_a_zero_part,
)
from .cases import params_to_cuda, to_cuda, to_numpy, torch

pytestmark = pytest.mark.gpu
PER_ROW = "FP8_PER_CHANNEL_PER_TOKEN"


def methods(case: Any, compute: str = "exact") -> tuple[LinearMethod, LinearMethod]:
    """The layer on the CPU and on the GPU."""
    return case.method(compute=compute), case.method(compute=compute, device="cuda:0")


def assert_same(prepared: Any, expected: Any) -> None:
    assert sorted(prepared) == sorted(expected)
    for name, value in expected.items():
        assert prepared[name].is_cuda
        np.testing.assert_array_equal(to_numpy(prepared[name]).view(np.uint8), value.view(np.uint8), name)


@pytest.mark.parametrize("algo, compute", COMPUTES)
@pytest.mark.parametrize(
    "columns, rows", [(16, [1]), (288, [33, 130, 7]), (512, [128, 256, 128]), (5120, [300]), (28672, [5, 3])]
)
def test_same_bits_as_on_the_cpu(rng: Any, algo: str, compute: str, columns: int, rows: list[int]) -> None:
    case = random_case(rng, algo, columns, rows)
    gpu = case.method(compute=compute, device="cuda:0")
    expected = prepared_for_cuda(case, compute)
    assert_same(gpu.prepare(params_to_cuda(case.listed())), expected)
    if algo != "FP8_PB_WO" or all(n % 128 == 0 for n in rows[:-1]):
        assert_same(gpu.prepare(params_to_cuda(case.fused())), expected)


@pytest.mark.parametrize("algo", ["FP8", PER_ROW, "FP8_PB_WO"])
@pytest.mark.parametrize("columns", [1, 15, 131, 1000])
def test_columns_that_no_vector_divides(rng: Any, algo: str, columns: int) -> None:
    case = random_case(rng, algo, columns, [3, 64, 11])
    cpu, gpu = methods(case)
    assert_same(gpu.prepare(params_to_cuda(case.listed())), cpu.prepare(case.listed()))


@pytest.mark.parametrize("algo, compute", COMPUTES)
@pytest.mark.parametrize("start", [16, 3])
def test_rows_of_a_wider_tensor(rng: Any, algo: str, compute: str, start: int) -> None:
    case = random_case(rng, algo, 256, [20, 9])
    gpu = case.method(compute=compute, device="cuda:0")
    params = params_to_cuda(case.listed())
    for name in ("weight", "weight_scale") if algo.endswith("NVFP4") else ("weight",):
        for i, part in enumerate(params[name]):
            wide = torch.full((part.shape[0] * 2, part.shape[1] + 64), 0xFF, dtype=torch.uint8, device="cuda")
            wide[::2, start : start + part.shape[1]] = part
            params[name][i] = wide[::2, start : start + part.shape[1]]
    assert_same(gpu.prepare(params), prepared_for_cuda(case, compute))


@pytest.mark.parametrize("algo, compute", COMPUTES)
def test_scales_may_be_on_the_host_and_numbers(rng: Any, algo: str, compute: str) -> None:
    case = random_case(rng, algo, 128, [24, 40])
    gpu, expected = case.method(compute=compute, device="cuda:0"), prepared_for_cuda(case, compute)
    codes = ("weight", "weight_scale") if algo.endswith("NVFP4") else ("weight",)
    params = {name: values for name, values in case.listed().items() if name not in codes}
    params |= params_to_cuda({name: case.listed()[name] for name in codes})
    assert_same(gpu.prepare(params), expected)
    numbers = {
        name: [float(v) if np.ndim(v) == 0 else v for v in values] if name not in codes else values
        for name, values in params.items()
    }
    assert_same(gpu.prepare(numbers), expected)


def test_dtypes_of_torch_and_bfloat16_scales(rng: Any) -> None:
    case = random_case(rng, PER_ROW, 64, [40])
    cpu, gpu = methods(case)
    scale = torch.from_numpy(case.parts[0]["weight_scale"]).bfloat16()
    expected = cpu.prepare({"weight": case.parts[0]["weight"], "weight_scale": scale.float().numpy()})
    params = {
        "weight": to_cuda(case.parts[0]["weight"]).view(torch.float8_e4m3fn),
        "weight_scale": scale.cuda(),
    }
    prepared = gpu.prepare(params)
    assert prepared["weight"].dtype == torch.float8_e4m3fn
    assert_same(prepared, expected)


@pytest.mark.parametrize("algo, compute", COMPUTES)
@pytest.mark.parametrize("on_device", [False, True])
def test_zero_scales_over_zeros_and_nan_mean_zero(rng: Any, algo: str, compute: str, on_device: bool) -> None:
    case = random_case(rng, algo, 128, [40, 24, 8])
    if algo == PER_ROW:
        zero = rng.random(40) < 0.3
        case.parts[0]["weight_scale"][zero] = 0
        case.parts[0]["weight"][zero] = 0x7F
    elif algo == "FP8_PB_WO":
        case.parts[1]["weight_scale"][...] = 0
        case.parts[1]["weight"][::2] = 0xFF
        case.parts[1]["weight"][1::2] = 0x80
    else:
        case.parts[1]["weight_scale_2" if algo.endswith("NVFP4") else "weight_scale"] = np.float32(0)
        case.parts[1]["weight_scale" if algo.endswith("NVFP4") else "weight"][:] = 0xFF
    gpu = case.method(compute=compute, device="cuda:0")
    expected = prepared_for_cuda(case, compute)
    params = params_to_cuda(case.listed())
    if not on_device:
        scale = "weight_scale_2" if algo.endswith("NVFP4") else "weight_scale"
        params[scale] = case.listed()[scale]
    assert_same(gpu.prepare(params), expected)
    again = {name: to_cuda(np.full_like(value, 7)) for name, value in expected.items()}
    assert gpu.prepare(params, again) is again
    assert_same(again, expected)


@pytest.mark.parametrize("algo, compute", COMPUTES)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("columns", [128, 1152])
def test_a_lost_scale_is_named_as_on_the_cpu_and_nothing_is_written(
    rng: Any, algo: str, compute: str, on_device: bool, columns: int
) -> None:
    case, scale, _, _ = with_a_lost_scale(rng, random_case(rng, algo, columns, [128, 40, 8]))
    cpu, gpu = methods(case, compute)
    out = gpu.prepare(params_to_cuda(random_case(rng, algo, columns, [128, 40, 8]).listed()))
    for value in out.values():
        value.view(torch.uint8).fill_(0x5A)
    with pytest.raises(ValueError, match="the scale is lost") as expected:
        cpu.prepare(case.listed())
    for source in (case.listed(), case.fused()):
        params = params_to_cuda(source)
        if not on_device:
            params[scale] = source[scale]
        for given in (None, out):
            with pytest.raises(ValueError) as error:
                gpu.prepare(params, given)
            assert str(error.value) == str(expected.value)
    for value in out.values():
        assert (value.view(torch.uint8) == 0x5A).all()


@pytest.mark.parametrize(
    "algo, compute", [("FP8", "exact"), (PER_ROW, "exact"), ("FP8_PB_WO", "exact"), ("NVFP4", "fp4")]
)
@pytest.mark.parametrize("zero", [False, True])
def test_prepared_codes_may_take_the_place_of_the_checkpoints(
    rng: Any, algo: str, compute: str, zero: bool
) -> None:
    case = random_case(rng, algo, 8192, [128, 40])
    case = with_a_zero_part(case, algo) if zero else case
    gpu, expected = case.method(compute=compute, device="cuda:0"), prepared_for_cuda(case, compute)
    params = params_to_cuda(case.fused())
    out = {name: to_cuda(np.full_like(value, 7)) for name, value in expected.items()}
    places = ("weight",) if compute == "fp4" else ("weight", "weight_scale")  # swizzled scales have their own
    out |= {name: params[name] for name in places if name in out}
    assert gpu.prepare(params, out) is out
    assert_same(out, expected)


@pytest.mark.parametrize("algo, compute", COMPUTES)
def test_reload_in_place(rng: Any, algo: str, compute: str) -> None:
    case = random_case(rng, algo, 128, [40, 24])
    gpu = case.method(compute=compute, device="cuda:0")
    first = gpu.prepare(params_to_cuda(case.listed()))
    addresses = {name: value.data_ptr() for name, value in first.items()}
    other = random_case(rng, algo, 128, [40, 24])
    assert gpu.prepare(params_to_cuda(other.listed()), first) is first
    assert addresses == {name: value.data_ptr() for name, value in first.items()}
    assert_same(first, prepared_for_cuda(other, compute))


@pytest.mark.parametrize("algo, compute", [("FP8", "exact"), ("NVFP4", "fp4"), ("W4A8_NVFP4_FP8", "exact")])
def test_a_reload_without_an_input_scale_does_not_keep_the_previous_checkpoints(
    rng: Any, algo: str, compute: str
) -> None:
    case, other = (random_case(rng, algo, 128, [40, 24]) for _ in range(2))
    gpu = case.method(compute=compute, device="cuda:0")
    first = gpu.prepare(params_to_cuda(case.listed()))
    before = {name: value.clone() for name, value in first.items()}
    source = params_to_cuda(other.listed())
    del source["input_scale"]
    with pytest.raises(ValueError, match=r'^out\["input_scale"\]: params have no input_scale'):
        gpu.prepare(source, first)
    assert all(torch.equal(first[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before)
    del first["input_scale"]
    fresh = gpu.prepare(source)
    assert gpu.prepare(source, first) is first
    assert_same(first, {name: to_numpy(value) for name, value in fresh.items()})


@pytest.mark.parametrize("compute", ["exact", "fp8"])
@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize("zero", [False, True])
def test_slabs_with_rows_of_several_partitions(rng: Any, compute: str, group_size: int, zero: bool) -> None:
    for columns, rows in ((32, [1] * 5), (96, [15, 2, 31, 8]), (4128, [3] * 64), (160, [64, 64, 1])):
        case = random_case(rng, "W4A16_NVFP4", columns, rows, group_size)
        case = with_a_zero_part(case, case.algo) if zero else case
        gpu, expected = case.method(compute=compute, device="cuda:0"), prepared_for_cuda(case, compute)
        assert_same(gpu.prepare(params_to_cuda(case.listed())), expected)
        assert_same(gpu.prepare(params_to_cuda(case.fused())), expected)


@pytest.mark.parametrize("name", ["weight", "weight_scale"])
def test_a_packed_weight_takes_nobodys_place(rng: Any, name: str) -> None:
    case = random_case(rng, "NVFP4", 1024, [128])
    gpu, params = case.method(device="cuda:0"), params_to_cuda(case.fused())
    out = gpu.prepare(params)
    memory = torch.empty(2 * out["weight"].numel(), dtype=torch.uint8, device="cuda")
    size = params[name].numel()
    there = memory[:size].view(params[name].shape).copy_(params[name])
    out["weight"] = memory[: out["weight"].numel()].view(out["weight"].shape)
    with pytest.raises(BufferError, match="memory"):
        gpu.prepare(params | {name: there}, out)


def test_many_threads_at_once(rng: Any) -> None:
    """A fault that one call finds is not another's, even with more calls than notes."""
    cases = [random_case(rng, "NVFP4", 128, [32]) for _ in range(4)]
    method, expected = cases[0].method(device="cuda:0"), [prepared_for_cuda(case, "exact") for case in cases]
    cases[3].parts[0]["weight_scale"][5, 2] = 0x7F
    params = [params_to_cuda(case.listed()) for case in cases]

    def work(index: int) -> Any:
        try:
            return method.prepare(params[index % 4])
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(100) as pool:
        results = list(pool.map(work, range(800)))
    for index, result in enumerate(results):
        if index % 4 == 3:
            assert result.endswith("at row 5, column 2")
        elif index < 100 or index > 700:
            assert_same(result, expected[index % 4])


def test_packing_needs_no_memory_but_its_result(rng: Any) -> None:
    rows, columns = 8192, 8192
    weight = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(0, 0x7F, (rows, columns // 16), dtype=torch.uint8, device="cuda")
    params = {"weight": weight, "weight_scale": scale, "weight_scale_2": np.float32(1)}
    for compute in ("exact", "fp8"):
        method = LinearMethod("W4A16_NVFP4", columns, [rows], device="cuda:0", compute=compute)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        prepared = method.prepare(params)
        held = sum(value.nbytes for value in prepared.values())
        assert torch.cuda.max_memory_allocated() - before <= held + 4096
        del prepared


@pytest.mark.parametrize("algo", ["FP8", PER_ROW, "FP8_PB_WO", "NVFP4"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_call_right_after_a_reload(rng: Any, algo: str, tokens: int) -> None:
    """The kernel asks for its weight before the kernel ahead of it is known to have ended."""
    cases = [random_case(rng, algo, 1024, [2048]) for _ in range(2)]
    sources = [params_to_cuda(case.listed()) for case in cases]
    x = to_cuda(random_x(rng, (tokens, 1024), "bfloat16"), "bfloat16")
    method = cases[0].method(device="cuda:0")
    expected = [method(x, method.prepare(source)).clone() for source in sources]
    params = method.prepare(sources[0])
    for turn in range(50):
        y = method(x, method.prepare(sources[turn % 2], params))
        assert torch.equal(y.view(torch.int16), expected[turn % 2].view(torch.int16)), turn


@pytest.mark.parametrize("algo, compute", COMPUTES)
@pytest.mark.parametrize("columns", [128, 8192])
def test_damage_is_named_as_on_the_cpu_and_nothing_is_written(
    rng: Any, algo: str, compute: str, columns: int
) -> None:
    case = random_case(rng, algo, columns, [30, 70])
    name = "weight_scale" if algo.endswith("NVFP4") else "weight"
    cpu, gpu = methods(case, compute)
    out = gpu.prepare(params_to_cuda(case.listed()))
    for value in out.values():
        value.view(torch.uint8).fill_(0x5A)
    for _ in range(3):  # several bad codes: the first is named
        part = case.parts[rng.integers(2)][name]
        bad = [0x7F, 0xFF] if name == "weight" else [0x7F, 0xFF, 0x81, 0xFE]
        part[rng.integers(part.shape[0]), rng.integers(part.shape[1])] = rng.choice(bad)
    with pytest.raises(ValueError) as expected:
        cpu.prepare(case.listed())
    for given in (None, out):
        with pytest.raises(ValueError) as error:
            gpu.prepare(params_to_cuda(case.listed()), given)
        assert str(error.value) == str(expected.value)
    for value in out.values():
        assert (value.view(torch.uint8) == 0x5A).all()


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("algo", [PER_ROW, "FP8_PB_WO"])
@pytest.mark.parametrize("on_device", [False, True])
def test_bad_scales_are_named_as_on_the_cpu(rng: Any, algo: str, bad: float, on_device: bool) -> None:
    case = random_case(rng, algo, 1152, [300, 30])
    case.parts[0]["weight_scale"].reshape(-1)[17] = bad
    cpu, gpu = methods(case)
    with pytest.raises(ValueError) as expected:
        cpu.prepare(case.listed())
    params = params_to_cuda(case.listed())
    if not on_device:
        params["weight_scale"] = case.listed()["weight_scale"]
    with pytest.raises(ValueError) as error:
        gpu.prepare(params)
    assert str(error.value) == str(expected.value)
    assert "17" in str(error.value)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("compute", ["exact", "fp8"])
def test_bad_scales_of_packed_partitions_are_named_as_on_the_cpu(rng: Any, bad: float, compute: str) -> None:
    """Before a bad block scale, and before a bad input_scale."""
    case = random_case(rng, "NVFP4", 1152, [300, 30, 8])
    case.parts[1]["weight_scale_2"] = np.float32(bad)
    case.parts[0]["weight_scale"][3, 5] = 0x7F
    case.parts[2]["input_scale"] = np.float32(-1)
    cpu, gpu = methods(case, compute)
    out = gpu.prepare(params_to_cuda(random_case(rng, "NVFP4", 1152, [300, 30, 8]).listed()))
    copies = {name: value.clone() for name, value in out.items()}
    for params in (case.listed(), case.fused()):
        with pytest.raises(ValueError, match=r"^weight_scale_2: .* at index 1") as expected:
            cpu.prepare(params)
        for given in (None, out):
            with pytest.raises(ValueError) as error:
                gpu.prepare(params_to_cuda(params), given)
            assert str(error.value) == str(expected.value)
    for name, value in out.items():
        assert torch.equal(value, copies[name])


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("algo, compute", [("FP8", "exact"), ("NVFP4", "exact"), ("NVFP4", "fp4")])
@pytest.mark.parametrize("fused", [False, True])
def test_bad_input_scales_are_named_as_on_the_cpu(
    rng: Any, algo: str, compute: str, bad: float, fused: bool
) -> None:
    """Before a bad code, after a scale of zero."""
    case = random_case(rng, algo, 1152, [300, 30, 8])
    cpu, gpu = methods(case, compute)
    out = gpu.prepare(params_to_cuda(case.listed()))
    copies = {name: value.clone() for name, value in out.items()}
    case.parts[1]["input_scale"] = np.float32(bad)
    with_a_zero_part(case, algo)
    case.parts[2]["weight_scale" if algo == "NVFP4" else "weight"][3, 5] = 0x7F
    params = case.fused() if fused else case.listed()
    with pytest.raises(ValueError, match=r"^input_scale: ") as expected:
        cpu.prepare(params)
    for given in (None, out):
        with pytest.raises(ValueError) as error:
            gpu.prepare(params_to_cuda(params), given)
        assert str(error.value) == str(expected.value)
    for name, value in out.items():
        assert torch.equal(value.view(torch.uint8), copies[name].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_input_scale_of_all_partitions(rng: Any, dtype: Any) -> None:
    case = random_case(rng, "FP8", 96, [30, 7, 60])
    for part in case.parts:
        part["input_scale"] = np.float32(0.25)
    gpu, expected = case.method(device="cuda:0"), prepared_for_cuda(case, "exact")
    for shape in ((), (1,), (1, 1)):
        scale = torch.full(shape, 0.25, dtype=dtype, device="cuda")
        params = params_to_cuda(case.fused()) | {"input_scale": scale}
        assert_same(gpu.prepare(params), expected)
        again = {name: to_cuda(np.full_like(value, 7)) for name, value in expected.items()}
        assert_same(gpu.prepare(params, again), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", ["exact", "fp8"])
@pytest.mark.parametrize("value", [0.0, 0.25])
def test_one_scale_of_all_packed_partitions(rng: Any, dtype: Any, compute: str, value: float) -> None:
    case = random_case(rng, "W4A16_NVFP4", 96, [30, 7, 60])
    for part in case.parts:
        part["weight_scale_2"] = np.float32(value)
    if value == 0:
        for part, code in zip(case.parts, (0xFF, 0x80, 0x7F), strict=True):
            part["weight_scale"][:] = code
    gpu, expected = case.method(compute=compute, device="cuda:0"), prepared_for_cuda(case, compute)
    for shape in ((), (1,), (1, 1)):
        scale = torch.full(shape, value, dtype=dtype, device="cuda")
        params = params_to_cuda(case.fused()) | {"weight_scale_2": scale}
        assert_same(gpu.prepare(params), expected)
        assert_same(gpu.prepare(params, gpu.prepare(params)), expected)


@pytest.mark.parametrize("algo", [PER_ROW, "FP8_PB_WO"])
def test_of_two_bad_scales_the_first_is_named(rng: Any, algo: str) -> None:
    case = random_case(rng, algo, 256, [200])
    case.parts[0]["weight_scale"].reshape(-1)[1] = -1.0
    params = case.listed() | {"input_scale": [np.float32("nan")]}
    cpu, gpu = methods(case)
    with pytest.raises(ValueError, match=r"^weight_scale: ") as expected:
        cpu.prepare(params)
    with pytest.raises(ValueError) as error:
        gpu.prepare(params_to_cuda(params))
    assert str(error.value) == str(expected.value)


def test_a_weight_on_the_host_is_refused(rng: Any) -> None:
    case = random_case(rng, "FP8", 64, [8])
    _, gpu = methods(case)
    with pytest.raises(ValueError, match=r"^weight: expected a tensor on cuda:0, got one on cpu"):
        gpu.prepare(case.listed())


def test_scales_on_the_gpu_do_not_suit_a_layer_on_the_cpu(rng: Any) -> None:
    case = random_case(rng, "FP8", 64, [8])
    cpu, _ = methods(case)
    params = case.listed() | {"weight_scale": params_to_cuda(case.listed())["weight_scale"]}
    with pytest.raises(ValueError, match=r"^weight_scale: expected a tensor on cpu, got one on cuda:0"):
        cpu.prepare(params)


def test_a_capture_is_refused_and_survives(rng: Any) -> None:
    case = random_case(rng, "FP8", 64, [8])
    _, gpu = methods(case)
    params = params_to_cuda(case.listed())
    out = gpu.prepare(params)
    x = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        with pytest.raises(RuntimeError, match="captured"):
            gpu.prepare(params, out)
    graph.replay()
    assert x.cpu().tolist() == [1] * 4


def test_work_is_ordered_by_the_streams_of_the_framework(rng: Any) -> None:
    case = random_case(rng, "FP8", 4096, [4096])
    cpu, gpu = methods(case)
    expected = cpu.prepare(case.listed())
    stream = torch.cuda.Stream()
    weight = torch.zeros(4096, 4096, dtype=torch.uint8, device="cuda")
    source = params_to_cuda(case.listed())
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        weight.copy_(source["weight"][0])
        prepared = gpu.prepare(source | {"weight": weight})
        copy = {name: value.clone() for name, value in prepared.items()}
    stream.synchronize()
    assert_same(copy, expected)


@pytest.mark.slow
def test_more_than_4_gib(rng: Any) -> None:
    rows, columns = 70_000, 65_536
    part = random_part(rng, "FP8", 1, 16)
    method = LinearMethod("FP8", columns, [rows], device="cuda:0")
    weight = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8, device="cuda")
    params = {"weight": weight, "weight_scale": part["weight_scale"], "input_scale": part["input_scale"]}
    assert torch.equal(method.prepare(params)["weight"], weight)
    weight[69_999, 65_530] = 0x7F
    with pytest.raises(ValueError, match="row 69999, column 65530"):
        method.prepare(params)
