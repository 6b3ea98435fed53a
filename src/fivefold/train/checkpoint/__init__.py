"""Checkpoints that resume in any other layout, by torch.distributed.checkpoint (DCP).

A checkpoint is a folder `step-000123`: the state after 123 steps. Each rank writes the pieces
that it holds, under the parameter's global name and with their place in the whole tensor, so a
rank of another layout can assemble the pieces it needs. It is written into a hidden folder,
synced to the disk, and then renamed: a folder with the right name is complete, whenever the
processes or the machine died.
"""

from fivefold.train.checkpoint.loading import load
from fivefold.train.checkpoint.saved import Saved, check_resumable, check_room, find, identity
from fivefold.train.checkpoint.saving import prune, save

__all__ = [
    "Saved",
    "check_resumable",
    "check_room",
    "find",
    "identity",
    "load",
    "prune",
    "save",
]
