"""Weights that FSDP2 gathers and reduces together (`parallel.data.run`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from fivefold.model.weights import Weight
from fivefold.parallel.workload import FP32, RankWorkload, shard_degree
from fivefold.plan.operations.operation import Bytes


@dataclass(frozen=True)
class ZeroUnit:
    """Bytes [layout] of the weights of a unit, where it is sharded."""

    gathered: Bytes = 0.0  # in the compute precision, of all shards
    gradients: Bytes = 0.0  # in fp32, whole
    padded: Bytes = 0.0  # in fp32, as they are reduced
    shard: Bytes = 0.0  # in fp32, reduced
    last: Bytes = 0.0  # in fp32, of its last weight, whose gradient outlives the others

    def __add__(self, other: ZeroUnit) -> ZeroUnit:
        """Both together; the last weight is the other's, where it has any."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return ZeroUnit(**{**sums, "last": np.where(other.padded, other.last, self.last)})

    def times(self, count: Bytes) -> ZeroUnit:
        return ZeroUnit(*(getattr(self, f.name) * count for f in fields(self)))


NO_UNIT = ZeroUnit()


def unit_of(weights: Iterable[Weight], work: RankWorkload) -> ZeroUnit:
    """The unit that these weights make, in their order."""
    total = NO_UNIT
    for weight in weights:
        sizes = work.sizes(weight)
        padded, shards = sizes.padded * sizes.sharded, shard_degree(work.layout, weight.is_routed)
        whole = FP32 * sizes.local * sizes.sharded
        total += ZeroUnit(
            gathered=work.element_bytes * padded,
            gradients=whole,
            padded=FP32 * padded,
            shard=FP32 * padded / shards,
            last=whole,
        )
    return total
