"""moqext in SGLang: ModelOpt checkpoints served through moqext's layers.

Nothing has to be imported: SGLang finds `register` through the entry point group `sglang.srt.plugins`.
MOQEXT_SGLANG=0 leaves SGLang alone. docs/sglang.md has the whole of it.
"""

import os

__all__ = ["register"]


def register() -> None:
    """Puts moqext in the place of SGLang's ModelOpt methods; does nothing where that has been done.

    SGLang calls it once in each of its processes. With MOQEXT_SGLANG=0 it does nothing.

    Raises:
        RuntimeError: this version of SGLang lacks what the plug-in needs; SGLang logs it and goes on alone.
    """
    if os.environ.get("MOQEXT_SGLANG", "1").startswith("0"):
        return
    from moqext_sglang.registration import register_methods

    register_methods()
