"""Text, or without a tokenizer its numbers, from a ModelOpt checkpoint in Transformers.

usage: python examples/transformers_generate.py CHECKPOINT [PROMPT]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import moqext_transformers  # noqa: F401  (registers moqext with Transformers)


def main(directory: str, prompt: str) -> None:
    """Generates greedily, on the GPU if there is one."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    options = {"max_new_tokens": 24, "do_sample": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError):  # a checkpoint of tests has none
        ids = torch.arange(1, 9, device=model.device).unsqueeze(0)
        print(model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)[0].tolist())
        return
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    print(tokenizer.decode(model.generate(**inputs, **options)[0], skip_special_tokens=True))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], " ".join(sys.argv[2:]) or "The capital of France is")
