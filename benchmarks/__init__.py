"""Benchmarks of moqext's own choices: the cache of `moqext tune` is ignored, unless MOQEXT_TUNE names one."""

import os

os.environ.setdefault("MOQEXT_TUNE", "0")
