"""Seconds of one optimizer step, by arithmetic, for many layouts at once.

The step is what its slowest pipeline rank does, and what it waits for. For three ranks (the
first, which has the embedding, a middle one, and the last, which has the head) every operation and
every transfer of the ledger gets its seconds from the job's machine.
"""

from __future__ import annotations

import numpy as np

from fivefold.cluster.constants import Constants
from fivefold.layout.batch import LayoutBatch
from fivefold.parallel.cost import SPLIT_COSTS
from fivefold.parallel.workload import ROLES, stage_work
from fivefold.plan.engines import Job
from fivefold.plan.time.accelerators import Accelerators
from fivefold.plan.time.breakdown import Time, Traffic
from fivefold.plan.time.machine import Machine, Places
from fivefold.plan.time.placement import members
from fivefold.plan.time.shared_cores import SharedCores


def machine_of(job: Job, constants: Constants) -> Machine:
    """The machine that a job is planned for."""
    return (SharedCores if job.cluster.cpu else Accelerators)(job, constants)


def estimate_time(job: Job, layouts: LayoutBatch, constants: Constants) -> Time:
    """The step time of every layout."""
    return step_time(job, layouts, traffic(job, layouts), constants)


def step_time(
    job: Job, layouts: LayoutBatch, traffic: dict[str, Traffic], constants: Constants
) -> Time:
    """The step time of layouts whose traffic is known."""
    return machine_of(job, constants).time(layouts, traffic)


def traffic(job: Job, layouts: LayoutBatch) -> dict[str, Traffic]:
    """What the ranks of each role send, with the seconds that a message alone takes."""
    machine, places = machine_of(job, job.cluster.device.constants), members(job.cluster, layouts)
    at, result = Places(places), {}
    for role in ROLES:
        work = stage_work(
            job.config,
            layouts,
            job.sequence_length,
            job.activations,
            role,
            mtp=job.mtp,
            flat=job.engine.flat_shards,
        )
        transfers = (t for split in SPLIT_COSTS for t in split.transfers(work))
        messages = [machine.message_seconds(t, at) for t in transfers if np.any(t.calls)]
        result[role] = Traffic(work, messages)
    return result
