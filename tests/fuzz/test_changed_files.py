"""The fuzz targets in Python, over changes of genuine files."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import mutate


@pytest.mark.parametrize("target", mutate.TARGETS)
def test_changed_genuine_files_are_read_or_refused(target, rng, tmp_path):
    mutate.run(target, tmp_path, seed=int(rng.integers(2**32)), runs=mutate.TARGETS[target].quick_runs)
