"""Pipeline parallelism (PP): splits the layers into stages on different ranks.

Sends hidden states to the next stage and their gradients back. `cost` counts the messages,
`schedules` builds tables of actions, `proof` checks them, `simulation` times them, `run` executes
them, `table_file` reads custom ones."""
