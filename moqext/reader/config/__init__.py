"""Configurations of a checkpoint: of its quantization, its model and its experts."""
