"""Formats of stored weights: told by data types and shapes, with layouts and scales."""
