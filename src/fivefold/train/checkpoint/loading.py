"""Loading a checkpoint into any layout."""

from __future__ import annotations

from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from fivefold.errors import UserError
from fivefold.train.checkpoint.dcp import LoadPlanner, Reader, first_failure, first_sentence
from fivefold.train.checkpoint.pieces import pieces
from fivefold.train.checkpoint.saved import Saved
from fivefold.train.trainer import Trainer


def load(trainer: Trainer, saved: Saved) -> None:
    """Read a checkpoint into a trainer of any layout, in place. All ranks call this. Raises
    UserError if a file cannot be read; the trainer is then of no use."""
    try:
        state_dict_loader.load(
            pieces(trainer), storage_reader=Reader(saved.folder), planner=LoadPlanner()
        )
    except CheckpointException as error:
        rank, cause = first_failure(error)
        raise UserError(
            f"rank {rank} cannot read the checkpoint {saved.folder} ({type(cause).__name__}: "
            f"{first_sentence(cause)}): move it away to resume from an older one"
        ) from cause
    trainer.optimizer.update_copies()
