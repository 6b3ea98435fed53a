"""Tensor parallelism (TP), with Megatron's sequence parallelism (sp): splits each layer's matrices.

A layer has pairs of split matrices: attention (q, k, v and o), and an MLP or a shared expert (gate,
up and down). The first matrix of a pair is split by columns (output features), the second by rows
(input features); attention is split by heads, the embedding, head and loss by vocabulary. A pair
needs one sum of hidden states [sequence, batch, hidden] over the tp ranks forward (its output), and
one backward (its input's gradient); the embedding needs one forward, the head one backward
(Megatron-LM, arXiv:1909.08053, section 3). With sp the sequence is split between the pairs: each
sum is a reduce-scatter, and an all-gather before the next pair. Gathered inputs are not kept but
gathered again for the weights' gradients (arXiv:2205.05198, section 4.2.2).

Where to find what:

- `model.weights`: how each weight is split (`Weight.split`), and whether its gradient is summed
  over tp ranks (`Weight.partial`); `parallel.shards` makes DTensors of it;
- `model.linear`: the column-parallel and row-parallel linear layers with their backward passes;
- `model.layers`, `model.loss`: where a stage calls the collectives;
- `run`: the collectives, and `apply`, which puts them into a stage;
- `cost`: which messages a step sends, by arithmetic (docs/splits/tensor.md).
"""
