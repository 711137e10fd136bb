"""`compare`: errors as NumPy has them, and layers that find each other whatever they are called."""

import json
import math
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from moqext.__main__ import main
from moqext.reader import matrices
from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.dequantize import dequantize_layer
from moqext.tools.compare import Difference, compare, open_side
from moqext.tools.compare_plot import axis, error_plot

from .expert_files import write_checkpoint

ml_dtypes = pytest.importorskip("ml_dtypes")
safetensors = pytest.importorskip("safetensors.numpy")

SVG = "{http://www.w3.org/2000/svg}"
EXPORTS = Path(__file__).parent / "data" / "exports"
CASES = json.loads((EXPORTS / "versions.json").read_text())["cases"]


def originals(case):
    return EXPORTS / f"{CASES[case]['model']}_bf16.safetensors"


def save(directory, tensors):
    directory.mkdir(exist_ok=True)
    safetensors.save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, directory / "model.safetensors"
    )
    return directory


def sides(tmp_path, first, second):
    return compare(open_side(save(tmp_path / "a", first)), open_side(save(tmp_path / "b", second)))


def matrix(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def check(row, ours, theirs):
    delta = ours.astype(float) - theirs.astype(float)
    relative = np.linalg.norm(delta) / np.linalg.norm(theirs.astype(float))
    assert row.relative_error == pytest.approx(relative, rel=1e-5)
    assert row.sqnr_db == pytest.approx(-20 * math.log10(relative), abs=1e-4)
    assert row.max_error == pytest.approx(np.abs(delta).max(), rel=1e-6)


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_layer_of_an_export_finds_its_original(case, monkeypatch):
    monkeypatch.setattr(matrices, "PIECE_BYTES", 4 << 10)
    monkeypatch.setattr("moqext.tools.compare.PIECE_BYTES", 4 << 10)
    with open_side(EXPORTS / case) as ours, open_side(originals(case)) as theirs:
        result = compare(ours, theirs)
        assert result.only_first == result.misshapen == result.only_second == ()
        quantized = list(matrices.quantized_matrices(ours))
        assert len(result.layers) == len(quantized)
        assert [row.relative_error for row in result.layers] == sorted(
            (row.relative_error for row in result.layers), reverse=True
        )
        worst = {"FP8": 0.04, "MXFP8": 0.04, "FP8_PER_CHANNEL_PER_TOKEN": 0.04, "FP8_PB_WO": 0.2}
        for row in result.layers:
            assert 0 <= row.relative_error < worst.get(row.formats[0], 0.2), row
            assert row.formats[1] == "BF16"
        by_name = {row.layer: row for row in result.layers}
        for item in quantized:
            if len(item.shape) == 2 and by_name[item.name].relative_error:
                theirs_now = theirs.tensor(f"{by_name[item.name].other}.weight").astype(np.float32)
                check(by_name[item.name], dequantize_layer(ours, item.record), theirs_now)


def test_a_checkpoint_equals_itself(data):
    with open_side(data / "exports/mixed_three") as ours:
        result = compare(ours, ours)
    assert {(row.relative_error, row.sqnr_db, row.max_error) for row in result.layers} == {
        (0.0, math.inf, 0.0)
    }
    assert (result.only_first, result.only_second, result.misshapen) == ((), (), ())


def test_single_experts_against_a_stack_in_memory(data, tmp_path, rng):
    """One side has w1, w3 and w2 of each expert, the other gate_up_proj [E, 2I, H] elsewhere."""
    shapes = {"w1": (48, 64), "w3": (48, 64), "w2": (64, 48)}
    parts = {(e, p): matrix(rng, *shapes[p]) for e in range(3) for p in shapes}
    container = "model.layers.0.block_sparse_moe.experts"
    ours = {f"{container}.{e}.{p}.weight": value for (e, p), value in parts.items()}
    noise = 0.01 * matrix(rng, 3, 96, 64)
    both = np.stack([np.concatenate([parts[e, "w1"], parts[e, "w3"]]) for e in range(3)])
    down = np.stack([parts[e, "w2"] for e in range(3)])
    prefix = "model.language_model.layers.0.mlp.experts"
    result = sides(tmp_path, ours, {f"{prefix}.gate_up_proj": both + noise, f"{prefix}.down_proj": down})
    assert (result.only_first, result.only_second, result.equal) == ((), (), 3)
    assert len(result.layers) == 6
    for row in result.layers:
        expert, part = int(row.layer.split(".")[-2]), row.layer[-2:]
        half = slice(48) if part == "w1" else slice(48, None)
        check(row, parts[expert, part], (both + noise)[expert, half])
        assert row.other == f"{prefix}.gate_up_proj[{expert}].{'gate' if part == 'w1' else 'up'}"


def test_a_stack_that_lies_the_other_way_round(tmp_path, rng):
    stack, noise = matrix(rng, 2, 48, 64), 0.01 * matrix(rng, 2, 48, 64)
    ours = {f"layers.0.mlp.experts.{e}.down_proj.weight": stack[e] for e in range(2)}
    theirs = {"layers.0.mlp.experts.down_proj": (stack + noise).swapaxes(1, 2)}
    result = sides(tmp_path, ours, theirs)
    for row in result.layers:
        expert = int(row.layer.split(".")[4])
        check(row, stack[expert], (stack + noise)[expert])
    assert len(result.layers) == 2


def test_fused_linears_against_their_parts(tmp_path, rng):
    q, k, v = matrix(rng, 64, 32), matrix(rng, 16, 32), matrix(rng, 16, 32)
    ours = {"model.layers.0.self_attn.qkv_proj.weight": np.concatenate([q, k, v + 1])}
    parts = zip("qkv", (q, k, v), strict=True)
    theirs = {f"layers.0.self_attn.{name}_proj.weight": value for name, value in parts}
    result = sides(tmp_path, ours, theirs)
    assert result.equal == 2
    assert [row.layer for row in result.layers] == ["model.layers.0.self_attn.qkv_proj[80:96]"]
    check(result.layers[0], v + 1, v)
    assert result.only_first == result.only_second == ()


def test_what_has_no_counterpart_is_listed(tmp_path, rng):
    ours = {"a.weight": matrix(rng, 4, 4), "b.weight": matrix(rng, 4, 4), "norm.weight": matrix(rng, 4)}
    theirs = {"a.weight": ours["a.weight"], "b.weight": matrix(rng, 4, 8), "c.weight": matrix(rng, 2, 2)}
    result = sides(tmp_path, ours, theirs)
    assert result.only_first == ("norm",)
    assert result.only_second == ("c",)
    assert result.misshapen == (("b", (4, 4), (4, 8)),)
    assert result.equal == 1


def test_not_a_number_is_the_worst_and_no_number_in_json(tmp_path, rng, capsys):
    value = matrix(rng, 8, 8)
    broken = value.copy()
    broken[2, 3] = np.nan
    a = save(tmp_path / "a", {"x.weight": broken, "y.weight": value + 1})
    b = save(tmp_path / "b", {"x.weight": value, "y.weight": value})
    assert main(["compare", str(a), str(b / "model.safetensors"), "--json", "--max-error", "1e9"]) == 1
    rows = json.loads(capsys.readouterr().out)["layers"]
    assert (rows[0]["layer"], rows[0]["relative_error"]) == ("x", None)


# Equal tensors, and those that only look so


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [([1e20, 1], [1e20, 2]), ([1e-23, 0], [0, 0]), ([3e-23, 1e-30], [2e-23, 1e-30]), ([3e38], [-3e38])],
)
def test_values_that_differ_are_never_equal(ours, theirs, tmp_path, capsys):
    """Their squares leave the range of float32."""
    first, second = (np.array([values], np.float32) for values in (ours, theirs))
    result = sides(tmp_path, {"x.weight": first}, {"x.weight": second})
    assert result.equal == 0
    assert result.layers[0].differing == 1
    check_exact = np.linalg.norm(first.astype(float) - second) / max(
        np.linalg.norm(second.astype(float)), 1e-99
    )
    if any(theirs):
        assert result.layers[0].relative_error == pytest.approx(check_exact, rel=1e-6)
    arguments = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--max-error", "0"]
    assert main(arguments) == 1
    assert " equal" not in capsys.readouterr().out.partition("plain tensors")[0]


def test_infinity_hides_no_difference_and_is_none_itself(tmp_path):
    mask = np.array([[-np.inf, 1, np.nan]], np.float32)
    assert sides(tmp_path, {"x.weight": mask}, {"x.weight": mask}).equal == 1
    row = sides(tmp_path, {"x.weight": mask + np.float32([0, 1, 0])}, {"x.weight": mask}).layers[0]
    assert (row.differing, row.relative_error, row.max_error) == (1, 1, 1)


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.bool_])
def test_tensors_of_other_types_and_single_values_are_compared(dtype, tmp_path):
    """The two values of 64 bits are one in float32."""
    one, other = (np.array(value).astype(dtype) for value in ((2**24, 1), (2**24 + 1, 0)))
    result = sides(tmp_path, {"x": one, "y": one[1]}, {"x": other, "y": one[1]})
    assert result.equal == 1
    assert [(row.layer, row.differing) for row in result.layers] == [("x", 2 if dtype != np.bool_ else 1)]
    assert sides(tmp_path, {"y": one[1]}, {"y": other[1]}).layers[0].differing == 1


# Names


def test_two_layers_that_differ_in_a_prefix_are_two(tmp_path, rng):
    value = matrix(rng, 4, 4)
    both = {"model.x.weight": value, "language_model.x.weight": value + 1}
    assert sides(tmp_path, both, both).equal == 2
    result = sides(tmp_path, both, {"model.x.weight": value})
    assert (result.equal, result.layers, result.only_first) == (1, (), ("language_model.x",))
    assert result.ambiguous == ()


def test_which_of_two_layers_is_meant_is_not_guessed(tmp_path, rng, capsys):
    value = matrix(rng, 4, 4)
    both = {"model.x.weight": value, "language_model.x.weight": value + 1, "y": value}
    result = sides(tmp_path, both, {"x.weight": value, "y": value})
    assert result.ambiguous == ((("language_model.x", "model.x"), ("x",)),)
    assert (result.equal, result.only_first, result.only_second) == (1, (), ())
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "not compared, as which is which is not told" in capsys.readouterr().out


def test_experts_of_two_containers_are_not_mixed(tmp_path, rng):
    one, other = matrix(rng, 2, 4, 4), matrix(rng, 2, 4, 4)
    names = [f"{prefix}layers.0.mlp.experts" for prefix in ("model.", "language_model.")]
    stacks = {f"{name}.down_proj": value for name, value in zip(names, (one, other), strict=True)}
    single = {
        f"{name}.{e}.down_proj.weight": value[e]
        for name, value in zip(names, (one, other), strict=True)
        for e in (0, 1)
    }
    assert sides(tmp_path, stacks, single).equal == 4
    del single[f"{names[1]}.0.down_proj.weight"], single[f"{names[1]}.1.down_proj.weight"]
    result = sides(tmp_path, stacks, single)
    assert (result.equal, result.only_first) == (2, (f"{names[1]}.down_proj",))


@pytest.mark.parametrize("name", ["x", "layers.0.mlp.experts.down_proj"])
@pytest.mark.parametrize("shape", [(2**33, 0, 0), (2**33, 0)])
def test_an_extent_that_nothing_backs_is_not_counted_to(name, shape, tmp_path):
    empty = {name: ("F32", np.empty(0, np.float32).reshape(shape))}
    single = {"layers.0.mlp.experts.0.down_proj.weight": ("F32", np.ones((2, 2), np.float32))}
    for folder, tensors in (("a", empty), ("b", empty), ("c", single)):
        write_checkpoint(tmp_path / folder, tensors, {"quant_algo": None})
    first, second, third = (open_side(tmp_path / folder) for folder in "abc")
    assert compare(first, second).equal == 1
    assert compare(first, third).equal == 0


# The command


def test_status_and_limits(data, capsys):
    arguments = ["compare", str(data / "exports/w4a16_nvfp4"), str(originals("w4a16_nvfp4"))]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "W4A16_NVFP4 / BF16" in text
    assert "plain tensors that are equal: 5" in text
    assert main([*arguments, "--max-error", "0.05"]) == 1
    assert main(["compare", str(data / "exports/fp8_kvcast"), str(originals("gpt_oss_fp8"))]) == 1
    assert "only in" in capsys.readouterr().out


def test_nothing_in_common_is_status_2(tmp_path, rng, capsys):
    a, b = (save(tmp_path / name, {f"{name}.weight": matrix(rng, 2, 2)}) for name in "ab")
    assert main(["compare", str(a), str(b)]) == 2
    assert "nothing in common" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--plot", "x.png"], ["--max-error", "-1"], ["--max-error", "nan"]])
def test_wrong_options(option, data):
    with pytest.raises(SystemExit):
        main(["compare", str(data), str(data), *option])


def test_plot_has_a_dot_for_every_layer(data, tmp_path):
    file = tmp_path / "errors.svg"
    assert (
        main(
            ["compare", str(data / "exports/mixed_three"), str(originals("mixed_three")), "--plot", str(file)]
        )
        == 0
    )
    root = ET.parse(file).getroot()
    circles = root.findall(f"{SVG}circle")
    formats = {"FP8 / BF16", "W4A16_NVFP4 / BF16", "FP8_PB_WO / BF16"}
    texts = {node.text for node in root.findall(f"{SVG}text")}
    assert texts >= formats | {"relative error", "0.mlp.down_proj", "1.self_attn.q_proj"}
    assert "layers in the order of the model, without model.layers." in texts
    assert len(circles) == 14 + len(formats)
    tooltips = [title.text for title in root.iter(f"{SVG}title")]
    assert len(tooltips) == 14
    first = "model.layers.0.mlp.down_proj: "
    assert sum(tooltip.startswith(first) and tooltip.endswith(" / BF16") for tooltip in tooltips) == 1


def difference(name, error, other=None):
    db = -20 * math.log10(error) if 0 < error < math.inf else math.inf
    return Difference(name, other or name, ("NVFP4", "BF16"), (16, 16), error, db, error, 1)


def dots(rows):
    """Height of each dot of a plot as a part of the frame's, and the tooltips."""
    root = ET.fromstring(error_plot(rows, "a & b"))
    frame = next(box for box in root.iter(f"{SVG}rect") if box.get("stroke"))
    top, height = (float(frame.get(name)) for name in ("y", "height"))
    circles = [circle for circle in root.iter(f"{SVG}circle") if circle.find(f"{SVG}title") is not None]
    shares = [1 - (float(circle.get("cy")) - top) / height for circle in circles]
    assert all(-1e-6 <= share <= 1 + 1e-6 for share in shares)
    return shares, [circle.find(f"{SVG}title").text for circle in circles]


@pytest.mark.parametrize(
    ("errors", "ticks"),
    [
        ([0.0995, 0.103], [0.05, 0.1, 0.2]),
        ([0.1, 0.1], [0.05, 0.1, 0.2]),
        ([0.02, 0.3], [0.01, 0.02, 0.05, 0.1, 0.2, 0.5]),
        ([1e-5, 0.3], [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]),
        ([], [5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2]),
    ],
)
def test_axis_spans_what_the_layers_have(errors, ticks):
    """Seven layers at 0.1 stood at the upper edge of an axis from 0.01 to 0.1."""
    found = axis(errors)
    assert found == ticks
    assert all(found[0] < error < found[-1] for error in errors)


def test_dots_stand_apart_from_the_edges():
    errors = enumerate((0.1, 0.103, 0.099))
    shares, tooltips = dots([difference(f"layers.{n}.up", error) for n, error in errors])
    assert all(0.2 < share < 0.8 for share in shares)
    assert shares[1] > shares[0] > shares[2]
    assert tooltips[0] == "layers.0.up: 1.000e-01, 20.0 dB, NVFP4 / BF16"


def test_dots_of_no_error_and_of_any():
    odd = [difference(name, error) for name, error in (("a<b", 0.0), ("c", math.inf), ("d", math.nan))]
    shares, tooltips = dots([*odd, difference("e", 0.1, "f")])
    assert shares[:3] == [0, 1, 1]
    assert tooltips[0] == "a<b: equal, NVFP4 / BF16"
    assert tooltips[3].startswith("e (f): ")


def test_names_of_many_layers_leave_each_other_room():
    rows = [difference(f"model.layers.{n}.{'long_' * 20}proj", 0.1) for n in range(500)]
    root = ET.fromstring(error_plot(rows, ""))
    turned = [text for text in root.iter(f"{SVG}text") if text.get("transform")]
    places = [float(text.get("x")) for text in turned]
    assert len(turned) == 56
    assert min(b - a for a, b in pairwise(places)) >= 13
    assert all(len(text.text) <= 44 for text in turned)
    height = float(root.get("height"))
    assert all(float(text.get("y")) < height for text in root.iter(f"{SVG}text"))


def test_a_file_beside_a_foreign_configuration_is_read_alone(data):
    with open_side(originals("fp8_kvcast")) as side:
        assert side.config is None
        assert side.architectures == ()
        assert len(side.files.files) == 1
        assert isinstance(side, CheckpointReader)
