"""Models: their shape, the table of their weights, and the modules that are trained."""
