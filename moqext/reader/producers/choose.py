"""Finds out which producer wrote a checkpoint: by the `quant_method` of its configuration."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moqext.reader.files.config_files import Document
from moqext.reader.producers.compressed_tensors import CompressedTensors
from moqext.reader.producers.gpt_oss import GptOss
from moqext.reader.producers.native_fp8 import NativeFp8
from moqext.reader.producers.producer import Producer

PRODUCERS: dict[str, Callable[[str, str, Mapping[str, Any]], Producer]] = {
    "compressed-tensors": CompressedTensors,
    "fp8": NativeFp8,
    "mxfp4": GptOss,
}
"""Their `quant_method`."""

_OF_MODELOPT = ("quant_algo", "quantization", "moe_quant_algo", "producer", "quant_library")
"""Fields of ModelOpt's configurations, which keep the `quant_method` of what it requantized in part."""


def choose_producer(documents: Sequence[Document]) -> Producer | None:
    """The producer, None for ModelOpt and for whoever is not read.

    Raises:
        ConfigError: the configuration of one cannot be understood.
    """
    methods = {_method(document) for _, _, document in documents}
    make = PRODUCERS.get(methods.pop()) if len(methods) == 1 else None
    if make is None or any(name in document for _, _, document in documents for name in _OF_MODELOPT):
        return None
    return make(*documents[0])


def _method(document: Any) -> str:
    """The `quant_method`, empty where there is none that is text."""
    method = document.get("quant_method") if isinstance(document, Mapping) else None
    return method if isinstance(method, str) else ""
