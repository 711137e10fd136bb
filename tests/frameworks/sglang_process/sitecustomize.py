"""Stand-ins in each process of SGLang's engine: Python imports this file when it starts."""

from sglang_absent import stand_in

stand_in()
