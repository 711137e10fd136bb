"""Configurations of all producers: options of the user, and whose layers are whose."""

import os
from typing import Any

from moqext_torch.stepping_aside import Reason
from moqext_vllm import hand_back
from moqext_vllm.attention import take_over
from moqext_vllm.compiled import install_pass
from moqext_vllm.settings import enter_settings, read_fast_accum, read_force, read_ops


class Choices:
    """A configuration that vLLM asks how a layer is quantized, as far as its producer does not matter.

    Attributes:
        refusal: what vLLM has against the configuration, None where it has nothing.
        algorithms: of layers, as the configuration names them.
        compute: as for `moqext.LinearMethod`.
        fast_accum: as for `moqext.LinearMethod`, of linears.
        force: whether moqext runs what it can, even where vLLM would be faster.
    """

    refusal: str | None = None
    algorithms: list[str]
    compute: str
    fast_accum: bool
    force: bool

    def read_options(self) -> None:
        """Takes what variables say.

        Raises:
            ValueError: one says something that nobody knows.
        """
        self.compute = os.environ.get("MOQEXT_VLLM_COMPUTE") or "exact"
        self.fast_accum, self.force = read_fast_accum(), read_force()

    def reason(self, algorithm: str) -> Reason | None:
        """Why layers of an algorithm are vLLM's, None where they are moqext's."""
        found = hand_back.reason_of_algorithm(algorithm, self.compute)
        kept = found is not None and found.runs and (self.force or self.refusal is not None)
        return None if kept else found

    @property
    def runs_any(self) -> bool:
        """Whether layers of some algorithm of the checkpoint are moqext's."""
        return any(self.reason(algorithm) is None for algorithm in self.algorithms)

    @property
    def runs_neighbours(self) -> bool:
        """Whether what is between linears is moqext's, too.

        Where vLLM's linears are the faster ones it joins norms and activations with them.
        """
        reasons = [self.reason(algorithm) for algorithm in self.algorithms]
        return None in reasons and not any(reason is not None and reason.fuses for reason in reasons)

    def enter(self, **more: Any) -> None:
        """Prepares the engine whose model is being built for layers of moqext.

        Args:
            more: settings besides those that all producers have.
        """
        enter_settings(
            compute=self.compute, fast_accum=self.fast_accum, ops=read_ops(), force=self.force, **more
        )
        if self.runs_neighbours:
            install_pass()
            take_over()
