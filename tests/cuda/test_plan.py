"""The CUDA rows of the plan table, on any machine: what they need, and what an error says of them."""

import pytest

from moqext import _C, LinearMethod, UnsupportedQuantization

from ..work import each

ALGOS = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"),
    *("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MXFP4", "W4A8_MXFP4_FP8"),
)


def reasons(algo="FP8", columns=4096, rows=(4096,), compute="exact", capability="9.0", dtype="bfloat16"):
    """Reasons by kernel, None where it can run, on a chip that need not be here."""
    plan = _C.linear_plan(algo, columns, rows, None, dtype, "cuda:0", compute, capability=capability)
    return dict(plan.explain())


def no_devices():
    """Why there are none, or None."""
    try:
        _C.cuda_devices()
    except RuntimeError as error:
        return str(error)
    return None


def refusal(**options):
    with pytest.raises(UnsupportedQuantization) as caught:
        reasons(**options)
    return str(caught.value)


def test_cpu_kernels_run_elsewhere():
    found = reasons()
    assert all("runs on the CPU" in found[name] for name in found if name.startswith("cpu:"))


@each("capability", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.1"])
@each("algo", ALGOS)
def test_every_layer_has_a_kernel_from_ampere_on(algo, capability):
    assert reasons(algo, columns=4128, capability=capability)["cuda:simt"] is None


@pytest.mark.parametrize("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4"])
def test_a_kernel_for_every_number_of_rows(algo):
    plan = _C.linear_plan(algo, 4096, [4096], None, "bfloat16", "cuda:0", "exact", capability="9.0")
    runnable = {name for name, reason in plan.explain() if reason is None}
    assert {plan.backend(tokens) for tokens in (*range(80), 1000, 2**31)} <= runnable
    assert plan.backend(0) == plan.backend(1)


@pytest.mark.parametrize("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4"])
def test_a_remembered_choice_is_the_choice(algo):
    """Where another number of rows had the place before, too, and for more rows than a place can tell."""

    def plan():
        return _C.linear_plan(algo, 4096, [4096], None, "bfloat16", "cuda:0", "exact", capability="9.0")

    used = plan()
    tokens = [first + 256 * i for first in (1, 16, 40, 255, 256) for i in (0, 1, 2, 0, 40)] + [
        2**47 + 1,
        1,
        2**63 - 1,
    ]
    assert len({plan().backend(count) for count in tokens}) > 1
    for count in tokens * 2:
        assert used.backend(count) == plan().backend(count), count


def plan_of(algo="FP8", compute="exact", columns=4096, rows=4096, capability="9.0"):
    return _C.linear_plan(algo, columns, [rows], None, "bfloat16", "cuda:0", compute, capability=capability)


MOST_TOKENS = [
    ("cuda:sm90_fp8_decode", "FP8", "exact", 16),
    ("cuda:sm90_fp8_prefill", "FP8_PB_WO", "exact", 2**24),
    ("cuda:sm90_nvfp4_decode", "NVFP4", "exact", 16),
    ("cuda:sm90_nvfp4_medium", "NVFP4", "exact", 2**22),
    ("cuda:sm90_nvfp4_prefill", "NVFP4", "exact", 2**24),
    ("cuda:sm90_nvfp4_fp8_prefill", "NVFP4", "fp8", 2**24),
    ("cuda:sm90_nvfp4_fp8_medium", "NVFP4", "fp8", 2**22),
]


@pytest.mark.parametrize("kernel, algo, compute, most", MOST_TOKENS)
def test_a_kernel_that_cannot_run_so_many_tokens_says_so(monkeypatch, kernel, algo, compute, most):
    """By explain(tokens), by a choice that is forced to it, and by tuning; before, its cost was infinite."""
    plan = plan_of(algo, compute)
    assert dict(plan.explain())[kernel] is dict(plan.explain(most))[kernel] is None
    reason = f"needs at most {most} tokens, got {most + 1}"
    assert dict(plan.explain(tokens=most + 1))[kernel] == reason
    assert plan.backend(most + 1) != kernel
    plan.keep(most, kernel, 0)
    with pytest.raises(ValueError, match=f"one of this plan that runs {most + 1} tokens"):
        plan.keep(most + 1, kernel, 0)
    monkeypatch.setenv("MOQEXT_KERNEL", kernel)
    forced = plan_of(algo, compute)
    assert forced.backend(most) == kernel
    for ask in (forced.backend, forced.compute_for):
        with pytest.raises(UnsupportedQuantization) as caught:
            ask(most + 1)
        assert f"{kernel} {reason}; unset MOQEXT_KERNEL" in str(caught.value)


@pytest.mark.parametrize(
    "compute, kernel", [("exact", "sm90_nvfp4_medium"), ("fp8", "sm90_nvfp4_fp8_medium")]
)
def test_more_outputs_than_tiles_are_counted_for(compute, kernel):
    plan = plan_of("NVFP4", compute, columns=16, rows=2**30)
    assert dict(plan.explain(1024))[f"cuda:{kernel}"] is None
    reason = dict(plan.explain(1025))[f"cuda:{kernel}"]
    assert reason == f"needs at most 2^40 outputs, got 1025 tokens of {2**30}"


@each("capability", ["8.0", "8.9", "9.0", "10.0"])
@each(
    "algo, compute",
    [("FP8", "exact"), ("FP8_PB_WO", "auto"), ("NVFP4", "exact"), ("NVFP4", "fp8"), ("NVFP4", "auto")],
)
def test_the_choice_can_run_as_many_tokens(algo, compute, capability):
    plan = plan_of(algo, compute, capability=capability)
    for tokens in (0, 1, 16, 17, 300, 2**22, 2**22 + 1, 2**24 + 1, 2**40):
        runnable = {name for name, reason in plan.explain(tokens) if reason is None}
        assert plan.backend(tokens) in runnable
        assert runnable <= {name for name, reason in plan.explain() if reason is None}
    assert plan.explain(0) == plan.explain(1)


@pytest.mark.parametrize("tokens", [-1, 1.5, "1"])
def test_what_is_no_number_of_tokens_is_not_explained(tokens):
    with pytest.raises((ValueError, TypeError), match="tokens"):
        plan_of().explain(tokens)


def test_older_chips_have_none():
    text = refusal(capability="7.5")
    assert "cuda:simt needs compute capability 8.0 or later, this device has 7.5" in text
    assert "cpu:" not in text


def test_kernels_of_sm90_run_there_alone():
    names = [name for name in reasons() if name.startswith("cuda:sm90_")]
    assert names
    for capability in ("8.9", "10.0", "12.0"):
        found = reasons(capability=capability)
        for name in names:
            assert "needs compute capability 9.0, this device has" in found[name]


def test_the_decoding_kernel_wants_fp8_and_whole_blocks():
    name = "cuda:sm90_fp8_decode"
    assert reasons(columns=4096)[name] is None
    assert "in_features to be a multiple of 128, got 4104" in reasons(columns=4104)[name]
    for compute in ("exact", "fp8", "fp4"):
        assert "FP8 weights" in reasons("NVFP4", compute=compute)[name]


def test_more_rows_than_an_int_counts_are_refused():
    assert "cuda:sm90_fp8_decode needs fewer than 2^31 rows" in refusal(rows=(2**31 - 1, 128))


def test_products_of_warps_want_fp8_and_parts_of_16():
    for name, least in (("cuda:sm80_fp8", "8.0"), ("cuda:sm89_fp8", "8.9")):
        for capability in ("8.0", "8.6", "8.9", "9.0", "12.0"):
            found = reasons("FP8_PB_WO", columns=4112, capability=capability)[name]
            if float(capability) >= float(least):
                assert found is None
            else:
                assert found == f"needs compute capability {least} or later, this device has {capability}"
        assert "in_features to be a multiple of 16, got 4104" in reasons(columns=4104)[name]
        for compute in ("exact", "fp8", "fp4"):
            assert "FP8 weights" in reasons("NVFP4", compute=compute)[name]


def test_exact_products_of_nvfp4_run_from_ampere_on():
    name = "cuda:sm80_nvfp4"
    for capability in ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0"):
        for algo in ("NVFP4", "W4A16_NVFP4"):
            for dtype in ("bfloat16", "float16"):
                assert reasons(algo, 4112, (100, 3), capability=capability, dtype=dtype)[name] is None
    assert "float32" in reasons("NVFP4", dtype="float32")[name]
    for compute in ("fp8", "fp4"):
        assert f"compute {compute} asks for another" in reasons("NVFP4", compute=compute)[name]
    assert "NVFP4 weights" in reasons("FP8")[name]
    assert reasons("NVFP4_AWQ")[name] is None
    assert "multiplies x as it is, W4A8_NVFP4_FP8 quantizes it" in reasons("W4A8_NVFP4_FP8")[name]


@pytest.mark.parametrize("capability", ["8.0", "8.9", "10.0", "12.0"])
def test_chips_but_hopper_take_products_of_warps_for_nvfp4(capability):
    plan = _C.linear_plan("NVFP4", 4096, (4096,), None, "bfloat16", "cuda:0", "exact", capability=capability)
    assert {plan.backend(tokens) for tokens in (1, 16, 64, 1000, 8192)} == {"cuda:sm80_nvfp4"}


def test_float32_outputs_want_products_that_are_exact():
    found = reasons(dtype="float32", capability="8.9")
    assert found["cuda:sm80_fp8"] is None
    assert "float32 outputs ask for 1e-5" in found["cuda:sm89_fp8"]


@pytest.mark.parametrize(
    "capability, dtype, kernel",
    [
        ("8.0", "bfloat16", "cuda:sm80_fp8"),
        ("8.6", "float32", "cuda:sm80_fp8"),
        ("8.9", "bfloat16", "cuda:sm89_fp8"),
        ("8.9", "float32", "cuda:sm80_fp8"),
    ],
)
def test_chips_before_hopper_take_products_of_warps(capability, dtype, kernel):
    plan = _C.linear_plan("FP8_PB_WO", 4096, (4096,), None, dtype, "cuda:0", "exact", capability=capability)
    assert {plan.backend(tokens) for tokens in (1, 16, 64, 1000, 8192)} == {kernel}


@pytest.mark.parametrize("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"])
def test_on_hopper_a_few_dozen_tokens_take_the_kernel_of_many(algo):
    plan = _C.linear_plan(algo, 4096, (4096,), None, "bfloat16", "cuda:0", "exact", capability="9.0")
    assert {plan.backend(tokens) for tokens in (24, 32)} == {"cuda:sm90_fp8_prefill"}


def test_the_kernel_of_many_tokens_wants_sixteens_and_one_input_scale():
    name = "cuda:sm90_fp8_prefill"
    for algo in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"):
        assert reasons(algo, columns=4112)[name] is None
        assert "in_features to be a multiple of 16, got 4104" in reasons(algo, columns=4104)[name]
        assert "float32 outputs" in reasons(algo, dtype="float32")[name]
    assert "2 partitions may have as many input scales" in reasons("FP8", rows=(64, 32))[name]
    assert reasons("FP8_PB_WO", rows=(64, 31))[name] is None
    assert "FP8 weights" in reasons("NVFP4")[name]


def test_a_layer_on_the_cpu_needs_no_chip():
    with pytest.raises(ValueError, match="capability: expected None for a layer on the CPU"):
        _C.linear_plan("FP8", 16, [16], None, "bfloat16", "cpu", "exact", "9.0")
    found = dict(_C.linear_plan("FP8", 16, [16], None, "bfloat16", "cpu", "exact").explain())
    assert all("the layer is on cpu" in found[name] for name in found if name.startswith("cuda:"))


@pytest.mark.parametrize("text", ["", "9", "90", "sm_90", "9.0a", "9.", "-1.0", "0.0"])
def test_a_capability_has_one_form(text):
    with pytest.raises(ValueError, match=r'capability: expected a compute capability as in "9\.0"'):
        reasons(capability=text)


def test_a_forced_kernel_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setenv("MOQEXT_KERNEL", "cuda:sm90_fp8_decode")
    with pytest.raises(UnsupportedQuantization, match=r"MOQEXT_KERNEL=cuda:sm90_fp8_decode .* got 4104"):
        reasons(columns=4104)
    with pytest.raises(UnsupportedQuantization, match="runs on a CUDA device, the layer is on cpu"):
        LinearMethod("FP8", 4096, [16])
    monkeypatch.setenv("MOQEXT_KERNEL", "cuda:nothing")
    with pytest.raises(ValueError, match='no kernel named "cuda:nothing"'):
        reasons()


def test_without_a_device_the_reason_is_given_once():
    """A build without CUDA, no driver, an old one: what cuda_devices() says."""
    reason = no_devices()
    if not reason:
        pytest.skip("there is a device")
    with pytest.raises(UnsupportedQuantization) as caught:
        LinearMethod("FP8", 4096, [4096], device="cuda:0")
    assert str(caught.value).startswith("no kernel can run FP8 4096x4096")
    assert str(caught.value).count(reason) == 1
    assert "cpu:" not in str(caught.value)


def test_a_device_that_is_not_there(monkeypatch):
    with pytest.raises(UnsupportedQuantization, match=r"no CUDA device|there is no cuda:63|without CUDA"):
        LinearMethod("FP8", 4096, [4096], device="cuda:63")


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4"])
def test_on_hopper_nvfp4_has_a_kernel_for_some_dozens_of_tokens(algo):
    name = "cuda:sm90_nvfp4_medium"
    for dtype in ("bfloat16", "float16"):
        plan = _C.linear_plan(algo, 4096, (4096,), None, dtype, "cuda:0", "exact", capability="9.0")
        assert {plan.backend(tokens) for tokens in (32, 48, 64)} == {name}
    assert reasons(algo, columns=4112, rows=(31, 64))[name] is None
    assert "16-bit activations, the layer has float32" in reasons(algo, dtype="float32")[name]
    assert "multiplies NVFP4 weights exactly" in reasons(algo, compute="fp8")[name]
    assert "multiplies NVFP4 weights exactly" in reasons("FP8")[name]
