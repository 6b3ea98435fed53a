"""Data parallelism (DP, ZeRO, HSDP): splits the sequences of a batch, and with ZeRO what is kept.

Sends gradients, and with ZeRO weights. `cost` counts the messages, `memory` the bytes kept, `run`
sums gradients, `fsdp` gives FSDP2 the messages of `comm`."""
