"""The degrees of a layout and what follows from them, for one layout or for many."""

from __future__ import annotations

from fivefold.arrays import Elementwise
from fivefold.layout.actions import FOLD, ActionTable

ORDER = ("tp", "cp", "ep", "dp", "pp")
"""The default rank order, innermost (fastest varying) axis first."""

RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("gpipe", "1f1b", "bfs", "zb-h1", "zb-v", "dualpipe-v")
"""The pipeline schedules that can be run; a table in a file (`*.csv`) can be run too."""
PLANNED_SCHEDULES = ("dualpipe",)
"""Schedules that can be planned, timed and drawn, but not run."""


class Degrees:
    """What follows from the degrees of a layout, elementwise: for one `Layout`, whose degrees are
    integers, and for many `LayoutBatch`, whose degrees are arrays."""

    tp: Elementwise
    sp: Elementwise
    pp: Elementwise
    vpp: Elementwise
    dp: Elementwise
    dp_replicate: Elementwise
    zero: Elementwise
    ep: Elementwise
    etp: Elementwise
    ulysses: Elementwise
    ring: Elementwise
    micro_batch: Elementwise
    accumulation: Elementwise
    recompute: Elementwise
    recompute_layers: Elementwise
    schedule: Elementwise
    order: tuple[str, ...]
    layers: tuple[int, ...] | None
    table: ActionTable | None

    @property
    def cp(self) -> Elementwise:
        """Context parallel degree: how many ranks share one sequence (ulysses * ring)."""
        return self.ulysses * self.ring

    @property
    def dp_shard(self) -> Elementwise:
        """Data parallel ranks that shard optimizer state, gradients or weights (ZeRO)."""
        return self.dp // self.dp_replicate

    @property
    def sp_degree(self) -> Elementwise:
        """Parts in which the tp ranks hold a sequence between the split matrices: tp, or 1."""
        return 1 + self.sp * (self.tp - 1)

    @property
    def world_size(self) -> Elementwise:
        """Devices, one for each rank."""
        return self.dp * self.pp * self.tp * self.cp

    @property
    def edp(self) -> Elementwise:
        """Ranks that hold a copy of the same expert weights and sum their gradients."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def edp_shard(self) -> Elementwise:
        """Copies of an expert that shard its state (ZeRO); the replicas of HSDP are not counted."""
        return self.edp // self.dp_replicate

    @property
    def backward_follows_at_once(self) -> Elementwise:
        """Does each micro-batch's backward pass come right after its forward pass?"""
        return (self.pp == 1) & (self.schedule == "1f1b")

    @property
    def stages(self) -> Elementwise:
        """Virtual pipeline stages; `stages.chunk_stage` says which rank holds which."""
        return self.pp * self.vpp

    @property
    def is_bidirectional(self) -> Elementwise:
        """Does each rank hold two stages, for micro-batches that come from both ends?

        DualPipe (arXiv:2412.19437, section 3.2.1) keeps two copies of the model, each for half of
        the micro-batches; the first stage of one is on the rank of the last stage of the other.
        """
        return self.schedule == "dualpipe"

    @property
    def is_v_shaped(self) -> Elementwise:
        """Do the chunks go down the ranks and up again in a V, so that rank 0 has both ends?"""
        if self.table is not None:
            return self.table.placement == FOLD
        return (self.schedule == "zb-v") | (self.schedule == "dualpipe-v")

    @property
    def first_and_last_share_rank(self) -> Elementwise:
        """Does the rank with the first stage also have a last one?"""
        return (self.pp == 1) | self.is_v_shaped | self.is_bidirectional

    @property
    def global_batch(self) -> Elementwise:
        """Sequences in one optimizer step."""
        return self.dp * self.micro_batch * self.accumulation
