"""A quantization method for an inference engine of one's own: create, load, prepare, apply.

The engine fuses q, k and v into one linear, is handed the tensors of the checkpoint one by one in any order,
and asks the configuration which of its layers are quantized, and how.

usage: python examples/own_engine.py CHECKPOINT [DEVICE]
"""

import sys

import torch

import moqext
from moqext_torch import as_torch

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
DTYPES = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}  # where NumPy may have bytes alone


class EngineLinear:
    """A linear of the engine; `rows` has those of each part that is fused into it."""

    def __init__(self, config: moqext.QuantConfig, name: str, columns: int, rows: list[int], device: str):
        parent, dot, last = name.rpartition(".")
        self.parts = [f"{parent}{dot}{part}" for part in FUSED.get(last, (last,))]
        self.device, self.method, roles = device, None, ["weight"]
        quant = config.layer_quant(name)  # raises where the parts of a fused name are not quantized alike
        if quant.quant_algo is not None:  # neither excluded nor left out of quantized_layers
            options = {"group_size": quant.group_size, "device": device}
            self.method = moqext.LinearMethod(quant.quant_algo, columns, rows, **options)
            roles = list(self.method.checkpoint_params)  # with the shape and dtype of each
        self.loaded: dict[str, dict[int, torch.Tensor]] = {role: {} for role in roles}

    def load(self, name: str, tensor: torch.Tensor) -> bool:
        """Takes a tensor of the checkpoint if it belongs to the layer."""
        module, _, role = name.rpartition(".")
        if module not in self.parts or role not in self.loaded:
            return False  # another layer's, or a scale of the KV cache
        self.loaded[role][self.parts.index(module)] = tensor.to(self.device)
        return True

    def prepare(self) -> None:
        """Turns what was loaded into what the kernels read, once; refuses what is missing or broken."""
        found = {role: [parts[i] for i in sorted(parts)] for role, parts in self.loaded.items() if parts}
        self.params = self.method.prepare(found) if self.method else torch.cat(found["weight"])
        self.loaded.clear()

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies: y = x Wᵀ."""
        return self.method(x, self.params) if self.method else torch.nn.functional.linear(x, self.params)


def main(directory: str, device: str) -> None:
    """Runs a fused projection, and the head, which most checkpoints exclude."""
    with moqext.Checkpoint(directory) as ckpt:
        columns = ckpt.tensors["model.norm.weight"].shape[0]
        for name in ("model.layers.0.self_attn.qkv_proj", "lm_head"):
            parts = dict.fromkeys(name.replace("qkv", part) for part in "qkv")
            rows = [ckpt.tensors[f"{part}.weight"].shape[0] for part in parts]
            linear = EngineLinear(ckpt.config, name, columns, rows, device)
            for tensor, info in ckpt.tensors.items():
                linear.load(tensor, as_torch(ckpt.tensor(tensor), DTYPES.get(info.dtype)))
            linear.prepare()
            x = torch.randn(4, columns, dtype=torch.bfloat16, device=device)
            y = linear.apply(x)
            print(f"{name}: {linear.method or 'not quantized'}")
            print(f"{tuple(x.shape)} -> {tuple(y.shape)}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cpu")
