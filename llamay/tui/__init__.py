"""The terminal interface: `run` opens it; `textual` is imported here and nowhere else."""
