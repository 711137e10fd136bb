"""A model of one's own in PyTorch with the quantized layers of a checkpoint, compiled.

usage: python examples/torch_linear.py CHECKPOINT
"""

import sys

import torch

import moqext
import moqext_torch


class FeedForward(torch.nn.Module):
    """The feed-forward block of a Llama, its linears named as in the checkpoint."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(width, inner, bias=False)
        self.up_proj = torch.nn.Linear(width, inner, bias=False)
        self.down_proj = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """down(silu(gate(x)) * up(x))."""
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def main(directory: str) -> None:
    """Fills a block from the first layer's, and runs it eagerly and compiled."""
    with moqext.Checkpoint(directory) as ckpt:
        inner, width = ckpt.layer("model.layers.0.mlp.up_proj").shape
        block = FeedForward(width, inner)
        for name, linear in list(block.named_children()):
            found = moqext_torch.QuantLinear.from_checkpoint(ckpt, f"model.layers.0.mlp.{name}")
            assert found.out_features == linear.out_features
            setattr(block, name, found)
    print(block)
    x = torch.randn(4, width, dtype=torch.bfloat16)
    with torch.inference_mode():
        y = block(x)
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        print("compiled equals eager:", compiled(x).equal(y))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
