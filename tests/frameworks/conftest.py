"""The framework packages lie in python/ of a checkout; an installed moqext has them beside it."""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("moqext_torch") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "python"))
