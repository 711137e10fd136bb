"""Layers that run: methods, experts in stacks, and loading from a checkpoint."""
