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
    methods = {document.get("quant_method") for _, _, document in documents if _is_text(document)}
    if len(methods) != 1 or len(methods & PRODUCERS.keys()) != 1:
        return None
    if any(not _is_text(document) or _of_modelopt(document) for _, _, document in documents):
        return None
    return PRODUCERS[methods.pop()](*documents[0])


def _is_text(document: Any) -> bool:
    return isinstance(document, Mapping) and isinstance(document.get("quant_method"), str)


def _of_modelopt(document: Mapping[str, Any]) -> bool:
    return any(name in document for name in _OF_MODELOPT)
