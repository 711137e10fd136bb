"""The files of a checkpoint: found, opened without trust, and read tensor by tensor."""
