"""Text, or without a tokenizer its numbers, from a ModelOpt checkpoint in Transformers.

usage: python examples/transformers_generate.py CHECKPOINT [PROMPT]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import moqext_transformers  # noqa: F401  (registers moqext with Transformers)
from moqext_torch import QuantMoE


def main(directory: str, prompt: str) -> None:
    """Generates greedily, on the GPU if there is one; mixtures of experts run on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    experts = any(isinstance(module, QuantMoE) for module in model.modules())
    model.to("cuda" if torch.cuda.is_available() and not experts else "cpu")
    options = {"max_new_tokens": 24, "do_sample": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError):
        tokenizer = None
    if (
        tokenizer is None or not tokenizer(prompt).input_ids
    ):  # a checkpoint of tests has none, or an empty one
        ids = torch.arange(1, 9, device=model.device).unsqueeze(0)
        print(model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)[0].tolist())
        return
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    print(tokenizer.decode(model.generate(**inputs, **options)[0], skip_special_tokens=True))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], " ".join(sys.argv[2:]) or "The capital of France is")
