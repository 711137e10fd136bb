"""Genuine exports beside the 16-bit models they were made from, for tests of the quantizer."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import moqext

DATA = Path(__file__).parent / "data"


class Case(NamedTuple):
    """A genuine export, and the options that make the same of its original."""

    export: str
    to: str | None
    rules: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    given: bool = True
    """Whether it was calibrated."""

    @property
    def directory(self) -> Path:
        return DATA / self.export

    @property
    def kv_cache(self) -> str | None:
        algo = moqext.QuantConfig.from_pretrained(self.directory).kv_cache_quant_algo
        return None if algo is None else algo.lower()

    @property
    def original(self) -> Path:
        folder, name = self.export.split("/")
        cases: Any = json.loads((DATA / folder / "versions.json").read_text())["cases"]
        model = dict(row[:2] for row in cases)[name] if isinstance(cases, list) else cases[name]["model"]
        return DATA / folder / f"{model}_bf16.safetensors"


def _mixed(*rules: str) -> tuple[str | None, tuple[str, ...]]:
    return None, rules


CASES = [
    Case("checkpoints/llama_fp8_kvfp8", "FP8"),
    Case("checkpoints/llama_fp8_pc_pt", "FP8_PER_CHANNEL_PER_TOKEN"),
    Case("checkpoints/llama_fp8_pb_wo", "FP8_PB_WO"),
    Case("checkpoints/llama_nvfp4_kvfp8", "NVFP4"),
    Case("checkpoints/llama_w4a16_nvfp4", "W4A16_NVFP4"),
    Case("checkpoints/llama_w4a8_nvfp4_fp8", "W4A8_NVFP4_FP8"),
    Case("checkpoints/llama_mxfp8", "MXFP8"),
    Case("checkpoints/llama_w4a8_mxfp4_fp8", "W4A8_MXFP4_FP8"),
    Case("checkpoints/qwen3moe_fp8", "FP8"),
    Case("checkpoints/qwen3moe_nvfp4", "NVFP4"),
    Case("exports/deepseek_nvfp4", "NVFP4"),
    Case("exports/fp8_bias_kvfp8", "FP8"),
    Case(
        "exports/fp8_excluded",
        "FP8",
        exclude=(
            "*layers.0.*",
            "*layers.1.*",
            "*layers.3.mlp.*",
            "*layers.4.self_attn.q_proj",
            "*layers.4.self_attn.k_proj",
            "*layers.4.self_attn.v_proj",
            "*layers.10.mlp.gate_proj",
            "*layers.10.mlp.up_proj",
        ),
    ),
    Case("exports/fp8_kvcast", "FP8"),
    Case("exports/fp8_lm_head", "FP8", ("lm_head FP8",)),
    Case("exports/fp8_pb_wo_one_block", "FP8_PB_WO"),
    Case("exports/fp8_pb_wo_unaligned", "FP8_PB_WO"),
    Case("exports/fp8_pc_pt_bias", "FP8_PER_CHANNEL_PER_TOKEN"),
    Case("exports/fp8_uncalibrated", "FP8", given=False),
    Case("exports/gpt_oss_fp8", "FP8"),
    Case("exports/gpt_oss_mxfp8", "MXFP8"),
    Case("exports/gpt_oss_nvfp4", "NVFP4"),
    Case("exports/llama4_fp8", "FP8"),
    Case("exports/llama4_nvfp4", "NVFP4"),
    Case("exports/mixed_fp8_nvfp4", *_mixed("*.layers.0.self_attn.* FP8", "*.mlp.* NVFP4")),
    Case("exports/mixed_in_qkv", *_mixed("*q_proj FP8", "*k_proj NVFP4", "*.mlp.* NVFP4")),
    Case(
        "exports/mixed_three",
        *_mixed("*self_attn* FP8", "*.layers.0.mlp.* W4A16_NVFP4", "*.layers.1.mlp.* FP8_PB_WO"),
    ),
    Case("exports/mixtral_fp8", "FP8"),
    Case("exports/mixtral_nvfp4", "NVFP4"),
    Case("exports/mxfp4", "MXFP4"),
    Case("exports/mxfp8", "MXFP8"),
    Case(
        "exports/nemotron_h_mixed",
        *_mixed("*mixer.experts* NVFP4", "*mixer.in_proj FP8", "*mixer.out_proj FP8"),
    ),
    Case("exports/nemotron_h_nvfp4", "NVFP4"),
    Case("exports/nvfp4_bias_kvnvfp4", "NVFP4"),
    Case("exports/nvfp4_lm_head", "NVFP4", ("lm_head NVFP4",)),
    Case("exports/nvfp4_mlp_only", None, ("*.mlp.* NVFP4",)),
    Case("exports/nvfp4_sharded", "NVFP4", exclude=("*layers.1.*",)),
    Case("exports/nvfp4_uncalibrated", "NVFP4", given=False),
    Case("exports/qwen3moe_mixed", *_mixed("*self_attn* FP8", "*mlp.experts* NVFP4")),
    Case("exports/w4a16_nvfp4", "W4A16_NVFP4"),
    Case("exports/w4a8_nvfp4_fp8", "W4A8_NVFP4_FP8"),
]

ZEROS = [Case("exports/fp8_zero", "FP8"), Case("exports/nvfp4_zero", "NVFP4")]
"""Exports of a model with weights of zeros, of which some are damaged."""


def unquantized(case: Case, directory: Path) -> Path:
    """The model that was exported, in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(case.original, directory / "model.safetensors")
    config = json.loads((case.directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def input_amax(case: Case) -> dict[str, float]:
    """Magnitudes by the names of the export: the float32 that gives each scale."""
    found = {}
    with moqext.Checkpoint(case.directory) as export:
        for name in export.tensors:
            for ending in (".input_scale", "_input_scale"):
                if name.endswith(ending):
                    module = name.removesuffix(ending)
                    scale = np.float32(export.tensor(name))
                    found[module] = amax_for(scale, 448.0 if is_fp8(export, module) else 2688.0)
    return found


def cache_amax(case: Case) -> dict[str, float]:
    """Magnitudes of keys and values: the float32 that gives each scale of the export's cache."""
    with moqext.Checkpoint(case.directory) as export:
        return {
            name.replace(f"{role}_proj.{role}_scale", f"{role}_cache"): amax_for(export.tensor(name), 448.0)
            for name in export.tensors
            for role in "kv"
            if name.endswith(f".{role}_scale")
        }


def is_fp8(export: moqext.Checkpoint, module: str) -> bool:
    """Whether the input of a module is FP8."""
    return export.layer(module).quant_algo in ("FP8", "W4A8_NVFP4_FP8")


def amax_for(scale: np.float32, most: float) -> float:
    """A float32 that is `scale` when it is divided by `most`."""
    guess = np.float32(np.float64(scale) * most)
    for candidate in (guess, np.nextafter(guess, np.float32(0)), np.nextafter(guess, np.float32(np.inf))):
        if candidate / np.float32(most) == scale:
            return float(candidate)
    raise AssertionError(scale)
