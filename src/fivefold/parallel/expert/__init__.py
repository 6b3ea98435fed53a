"""Expert parallelism (EP): splits the experts of a mixture over ranks.

Sends tokens to the ranks of their experts and back. `cost` counts the messages, `run` has the token
dispatcher."""
