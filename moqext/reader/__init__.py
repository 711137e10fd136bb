"""Reads checkpoints: files, names, configurations, formats, and problems found in them."""
