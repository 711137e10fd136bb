"""Text of a checkpoint as it comes, with its speed: what `moqext generate` runs."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils import logging

from moqext import Checkpoint
from moqext.ops.spelling import Compute
from moqext.reader.files.hub import hub_name
from moqext.reader.files.untrusted import expand_home
from moqext_transformers.loading import from_pretrained


def generate(
    directory: str,
    prompt: str,
    *,
    chat: bool = False,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    compute: Compute = "exact",
    write: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Continues a text by the model of a checkpoint, quantized or not.

    Args:
        directory: of the checkpoint with its tokenizer, or `org/name[@revision]` on the hub.
        prompt: what is continued.
        chat: whether the prompt is a question in the template of the tokenizer; the text is then the answer
            alone, and else the prompt and what follows it.
        max_new_tokens: tokens at most, at least 1.
        temperature: of the draws; 0 takes the most likely token each time.
        seed: of the draws; None draws one.
        device: as torch names it.
        dtype: of the activations, as "bfloat16"; None is that of the checkpoint.
        compute: as for `moqext_torch.QuantLinear`.
        write: called with each part of the text when it is there.

    Returns:
        `text`; `tokens` generated and `prompt_tokens`; `first_seconds` until the first of them,
        `tokens_per_second` after it, None where there is no other, and `load_seconds`; `quant_algo`, None
        where nothing is quantized; `dtype`, `device`, and `seed`, None where nothing was drawn.

    Raises:
        CheckpointError: no such checkpoint, or a problem of severity "error" stands against it.
        UnsupportedQuantization: an algorithm that does not run with that `compute`.
        RuntimeError: torch has no such device.
        ValueError: no tokenizer, no template where `chat` wants one, or a prompt without a token.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise RuntimeError(f"device {device!r}: torch {torch.__version__} sees no CUDA device")
    logging.disable_progress_bar()
    with Checkpoint(directory, headers_only=True) as files:
        algo = files.config.quant_algo if files.config else None
    begin = time.monotonic()
    hub = hub_name(directory)
    name = hub.repo if hub else expand_home(directory)
    where: dict[str, Any] = {"revision": hub.revision} if hub and hub.revision else {}
    tokenizer = _tokenizer(name, where)
    inputs = _inputs(tokenizer, prompt, chat)
    options: dict[str, Any] = {**where, "dtype": dtype or "auto"}
    if algo is None:
        model: Any = AutoModelForCausalLM.from_pretrained(name, **options)
    else:
        model = from_pretrained(name, compute=compute, **options)
    model = model.to(device).eval()
    loaded = time.monotonic()

    draws: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature:
        seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
        torch.manual_seed(seed)
        draws = {"do_sample": True, "temperature": temperature}
    stream = _Stream(tokenizer, write, skip_prompt=chat)
    model.generate(**inputs.to(device), max_new_tokens=max_new_tokens, streamer=stream, **draws)
    first, *others = stream.times
    return {
        "text": "".join(stream.parts),
        "tokens": len(stream.times),
        "prompt_tokens": int(inputs["input_ids"].shape[1]),
        "first_seconds": first - loaded,
        "tokens_per_second": len(others) / (others[-1] - first) if others else None,
        "load_seconds": loaded - begin,
        "quant_algo": algo,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device,
        "seed": seed if temperature else None,
    }


class _Stream(TextStreamer):
    """Keeps the parts of the text and when each token came, and hands parts on."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None] | None, *, skip_prompt: bool) -> None:
        super().__init__(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)
        self._write, self._prompt_came = write, False
        self.parts: list[str] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, then token after token."""
        if self._prompt_came:
            self.times.append(time.monotonic())
        self._prompt_came = True
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Takes a part of the text that no later token changes."""
        if text:
            self.parts.append(text)
            if self._write is not None:
                self._write(text)


def _tokenizer(name: str, where: dict[str, Any]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name, **where)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{name}: no tokenizer that Transformers can load (tokenizer.json and tokenizer_config.json, as "
            f"the original model has them): {str(error).splitlines()[0]}"
        ) from error


def _inputs(tokenizer: Any, prompt: str, chat: bool) -> Any:
    """Arguments of the model.

    Raises:
        ValueError: no template, or no token.
    """
    if chat:
        if not tokenizer.chat_template:
            raise ValueError("chat: the tokenizer has no template for it; leave --chat out")
        said = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            said, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    if not inputs["input_ids"].shape[-1]:
        raise ValueError(f"prompt: expected text that has a token, got {prompt!r}")
    inputs.pop("token_type_ids", None)
    return inputs
