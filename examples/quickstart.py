"""Opens a checkpoint, loads q, k and v as one layer, and runs it on NumPy and on torch tensors."""

import sys

import numpy as np

import moqext

with moqext.Checkpoint(sys.argv[1]) as ckpt:
    for problem in ckpt.problems:
        print(problem.severity, problem.code, problem.message)
    attention = "model.layers.0.self_attn"
    qkv = ckpt.load([f"{attention}.{name}_proj" for name in "qkv"], dtype="float32")

x = np.random.default_rng(0).standard_normal((4, qkv.in_features), dtype=np.float32)
y = qkv(x)  # a NumPy array for a NumPy array
print(qkv.backend, y.shape, y.dtype)

import torch  # noqa: E402

print(torch.allclose(qkv(torch.from_numpy(x)), torch.from_numpy(y)))  # a torch tensor for a torch tensor
