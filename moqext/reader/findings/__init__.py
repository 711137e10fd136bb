"""Finds the quantized layers of a checkpoint, and the problems that they have."""
