"""The device query, on a machine that has one."""

import pytest

from moqext import _C

pytestmark = pytest.mark.gpu


def test_devices_agree_with_torch():
    torch = pytest.importorskip("torch")
    devices = _C.cuda_devices()
    assert len(devices) == torch.cuda.device_count() > 0
    for device in devices:
        properties = torch.cuda.get_device_properties(device["index"])
        assert device["name"] == properties.name
        assert device["capability"] == (properties.major, properties.minor)
        assert device["sm_count"] == properties.multi_processor_count
        assert device["memory"] == properties.total_memory
