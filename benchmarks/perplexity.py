"""Perplexity of a model in each format that `moqext quantize` writes, beside the model itself.

    python examples/small_model.py ORIGINAL
    PYTHONPATH=.:python python -m benchmarks.perplexity ORIGINAL --json FILE

The text is that of Python's own documentation (`pydoc_data.topics`), in windows without overlap; scales of
activations come from windows that are not measured. All models compute with bfloat16 activations, the
quantized ones from their own codes. Beside the perplexity stand how often the most likely token is that of
the model itself, and what it answers to a question, greedily.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import moqext
import moqext_transformers
from benchmarks import record

CASES = (
    ("FP8", "exact"),
    ("FP8_PER_CHANNEL_PER_TOKEN", "exact"),
    ("MXFP8", "exact"),
    ("W4A16_NVFP4", "exact"),
    ("NVFP4", "fp4"),
)
"""Algorithms and `compute` of moqext: "fp4" has activations in NVFP4, as the algorithm says."""

QUESTION = "What is the capital of France?"
ANSWER = 24
"""Tokens at most."""


TEXT = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def windows(tokenizer: Any, context: int) -> Tensor:
    """int64 [windows, context] of the text."""
    ids = torch.tensor(tokenizer(TEXT).input_ids)
    return ids[: len(ids) // context * context].view(-1, context)


def measure(model: Any, batch: Tensor) -> tuple[float, Tensor]:
    """Mean loss of every token but a window's first, in float64, and the most likely tokens."""
    losses, likely = [], []
    with torch.inference_mode():
        for ids in batch:
            logits = model(ids[None].to(model.device)).logits[0, :-1].float().cpu()
            losses.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").double())
            likely.append(logits.argmax(1))
    return float(torch.cat(losses).mean()), torch.cat(likely)


def answer(model: Any, tokenizer: Any) -> str:
    """The model's answer to the question."""
    said = [{"role": "user", "content": QUESTION}]
    given = tokenizer.apply_chat_template(
        said, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    ids = model.generate(**given, max_new_tokens=ANSWER, do_sample=False)[0]
    text: str = tokenizer.decode(ids[given["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()


def main() -> None:
    """Prints the table of docs/transformers.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("original", type=Path, help="directory of an unquantized model with its tokenizer")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--calibrated", type=int, default=2, help="windows that the scales come from")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="a file for the results")
    options = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.original)
    all_windows = windows(tokenizer, options.context)
    if len(all_windows) < options.windows + options.calibrated:
        parser.error(f"the text has {len(all_windows)} windows of {options.context} tokens")
    batch, rest = all_windows[: options.windows], all_windows[-options.calibrated :]
    plain = transformers.AutoModelForCausalLM.from_pretrained(options.original, dtype=torch.bfloat16)
    plain = plain.to(options.device).eval()
    scales = moqext_transformers.calibrate(plain, [ids[None] for ids in rest])
    rows: list[dict[str, Any]] = []
    likely: Tensor | None = None

    def add(model: Any, algo: str, compute: str, size: int) -> Tensor:
        loss, found = measure(model, batch)
        row = {
            "algorithm": algo,
            "compute": compute,
            "bytes": size,
            "loss": loss,
            "perplexity": math.exp(loss),
            "same_token": 1.0 if likely is None else float((found == likely).double().mean()),
            "answer": answer(model, tokenizer),
        }
        rows.append(row)
        print(
            f"| {algo} | {size / 1e6:.0f} MB | {row['perplexity']:.2f} | {100 * row['same_token']:.1f} % "
            f"| {row['answer']} |",
            flush=True,
        )
        return found

    print("| | files | perplexity | same token | answer |\n|---|---:|---:|---:|---|")
    size = sum(file.stat().st_size for file in options.original.glob("*.safetensors"))
    likely = add(plain, "bfloat16", "", size)
    del plain
    for algo, compute in CASES:
        with tempfile.TemporaryDirectory() as folder, moqext.Checkpoint(options.original) as source:
            result = source.quantize(Path(folder, "out"), to=algo, scales=scales)
            model = moqext_transformers.from_pretrained(
                Path(folder, "out"), compute=compute, dtype=torch.bfloat16
            )
            add(model.to(options.device).eval(), algo, compute, result.bytes_written)
    if options.json:
        facts = {
            "transformers": transformers.__version__,
            "windows": options.windows,
            "context": options.context,
            "calibrated": options.calibrated,
            "device": options.device,
            "text": sha256(TEXT.encode()).hexdigest()[:16],
            "question": QUESTION,
        }
        record.write("perplexity", rows, options.json, **facts)


if __name__ == "__main__":
    main()
