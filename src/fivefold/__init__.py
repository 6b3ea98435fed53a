"""fivefold: choose, run and prove a five-way split of large-model training."""

__version__ = "0.2.0"
