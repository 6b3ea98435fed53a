"""The five splits, a package each: `cost` predicts what a split sends, `run` sends it.

A property test checks that the two agree to the byte (tests/parallel/test_cost.py)."""
