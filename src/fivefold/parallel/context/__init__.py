"""Context parallelism (CP: ulysses, ring, or both): splits each sequence around attention.

Sends heads (ulysses), or keys and values (ring). `cost` counts the messages, `run` puts attention
functions into a stage, `flash` is one block of attention, `positions` says who has which tokens."""
