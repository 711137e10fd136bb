"""Sleep: weights that leave the device, or are thrown away and loaded anew, into the same parameters."""

import pytest

from tests.vllm.conftest import genuine, on_cuda

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

NAMES = ("llama_fp8_kvfp8", "llama_nvfp4_kvfp8", "llama_fp8_pb_wo", "qwen3moe_fp8", "qwen3moe_nvfp4")


@pytest.fixture(scope="module")
def slept(each):
    if on_cuda():
        pytest.importorskip("vllm.cumem_allocator")  # a library of its own
    return each("sleep", genuine(NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_before(slept, name):
    found, in_place = slept[name]
    first = found.pop("first")
    assert len(found) == (2 if on_cuda() else 1)
    assert found == dict.fromkeys(found, first)
    assert in_place
