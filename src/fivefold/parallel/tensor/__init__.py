"""Tensor parallelism (TP), with Megatron's sequence parallelism (sp): splits each layer's matrices.

Sends sums of hidden states, with sp as gathers and scatters. `cost` counts the messages, `run` puts
the collectives into a stage; `parallel.shards` splits the weights by the table."""
