"""Programs on whole checkpoints and machines: verify, compare, convert and bench."""
