"""Whether a machine is busy follows from clocks: that of the wall, and that of a thread."""

import threading

import pytest

from moqext.tools import busy


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(busy, "BYTES", 1)


class Clocks:
    """A loop that takes one second of a processor, and as many of the wall as `walls` say in turn."""

    def __init__(self, walls):
        self._walls, self._lock = iter(walls), threading.Lock()
        self._state = threading.local()

    def clock(self):
        begun = getattr(self._state, "begun", False)
        self._state.begun = not begun
        with self._lock:
            return next(self._walls) if begun else 0.0

    def spent(self):
        had = getattr(self._state, "had", 0.0)
        self._state.had = had + 1
        return had


def calibrate(walls):
    clocks = Clocks(walls)
    return busy.calibrate(1, clocks.clock, clocks.spent)


def test_an_idle_machine():
    found = calibrate(busy.REPEATS * [1.0])
    assert found == busy.Calibration(1.0, 0.0)
    assert found.doubt == ""


def test_threads_that_wait_for_a_processor():
    found = calibrate(busy.REPEATS * [2.0])
    assert found == busy.Calibration(0.5, 0.0)
    assert found.doubt.startswith("the machine is busy: threads had a processor for 50% of their time")
    assert "\n" not in found.doubt


def test_repeats_that_differ():
    found = calibrate([1.0, *(busy.REPEATS - 1) * [1.1]])
    assert found.spread == pytest.approx(0.1)
    assert busy.Calibration(1.0, 0.1).doubt == ""
    assert "repeats of one loop took 30% longer" in busy.Calibration(1.0, 0.3).doubt


def test_real_clocks_are_a_share():
    found = busy.calibrate(2)
    assert found.share > 0
    assert found.spread >= 0
    assert found.as_dict() == {"share": found.share, "spread": found.spread}
