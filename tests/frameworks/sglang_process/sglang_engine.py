"""Tasks of the engine for the test, in a process of its own: `sglang_engine.py TASK DIRECTORY DEVICE DTYPE`.

Nothing of the plug-in is imported before SGLang has found it.
"""

import json
import sys

PROMPTS = [[2, 51, 14], [6, 30, 39, 28, 59], [7, 1, 56, 28, 24, 19, 10]]
"""The logit of each token that these models choose is at least 0.008 above the next, in float32."""
NEW = 16
OPTIONS = {
    "log_level": "info",  # an Engine says errors alone
    "kv_cache_dtype": "auto",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "context_length": 48,
    "max_total_tokens": 1024,
    "max_running_requests": 4,
}
DEVICES = {
    "cpu": {"attention_backend": "torch_native", "disable_cuda_graph": True},
    "cuda": {
        "attention_backend": "triton",
        "mem_fraction_static": 0.15,  # several engines share the GPU
        "cuda_graph_max_bs_decode": 4,
        "cuda_graph_backend_prefill": "disabled",
    },
}


def generate(engine):
    """The greedy tokens of every prompt."""
    how = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    return [out["output_ids"] for out in engine.generate(input_ids=PROMPTS, sampling_params=how)]


def tokens(directory, device, dtype):
    """Tokens of SGLang's engine, and those after its weights were loaded from the disk again."""
    import sglang

    about = {"model_path": directory, "device": device, "dtype": dtype}
    engine = sglang.Engine(**about, **OPTIONS, **DEVICES[device])
    before = generate(engine)
    done = engine.update_weights_from_disk(directory)
    after = generate(engine)
    print("RESULT", json.dumps([before, done[0], after]), flush=True)
    engine.shutdown()


def reference(directory, device, dtype):
    """Tokens of Transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    import moqext_transformers  # noqa: F401

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval().to(device)
    greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, **greedy)
        found.append(out[0, len(prompt) :].tolist())
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    {"tokens": tokens, "reference": reference}[sys.argv[1]](*sys.argv[2:])
