"""The types of what `fivefold.api` returns, and `--json` prints.

Keys are stable. Units are in their names. More keys may be added.
"""

from __future__ import annotations

from typing import TypedDict


class LedgerRow(TypedDict):
    """One kind of message of a device in one step."""

    split: str  # dp, pp, tp, cp, ep or world
    phase: str  # forward, backward or optimizer
    op: str  # all_reduce, all_gather, reduce_scatter, all_to_all or send
    group_size: int
    payload_bytes: float  # of one call
    calls: float
    wire_bytes: float  # of all calls
    tier: str
    time_s: float
    exposed_s: float  # what no compute hides
    stage: int  # pipeline rank


class Stage(TypedDict):
    """What one pipeline rank runs and keeps."""

    layers: list[int]  # of each virtual stage
    in_flight: float  # micro-batches
    memory_bytes: dict[str, float]  # by kind
    forward_s: float  # of one micro-batch
    backward_s: float


class Reason(TypedDict):
    """Why the layout has a split, or what it costs compared with the first."""

    split: str
    text: str
    peak_memory_bytes: float | None  # without the split
    step_time_ratio: float | None


class PlannedLayout(TypedDict):
    """A layout with its predicted time and memory. Bytes are those of one device."""

    layout: str
    meaning: str
    devices: int
    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    tokens_per_s_per_device: float
    model_flops_per_s_per_device: float
    mfu: float
    mfu_full_attention: float
    bubble_fraction: float
    peak_memory_bytes: float
    peak_memory_low_bytes: float
    peak_memory_high_bytes: float
    worst_stage: int
    verdict: str  # fits, tight or no
    memory_bytes: dict[str, float]  # by kind, on the fullest stage
    seconds: dict[str, float]  # by what they are spent on
    stages: list[Stage]
    ledger: list[LedgerRow]
    placement: dict[str, str]
    training_hours: float | None
    device_hours: float | None
    why: list[Reason]


class Model(TypedDict):
    name: str
    family: str
    total_params: int
    active_params: int  # per token
    flops_per_token: float  # forward and backward, causal attention
    flops_per_token_full_attention: float
    layers: int
    mtp_params: int


class Tier(TypedDict):
    name: str
    devices: int | None  # None: any number
    shape: str
    bandwidth_bytes_per_s: float  # per device and direction
    oversubscription: float


class ClusterFacts(TypedDict):
    name: str
    devices: int
    device: str
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: dict[str, float]  # by precision
    tiers: list[Tier]  # from the inside out


class MeasuredStep(TypedDict):
    layout: str
    step_time_s: float
    predicted_step_time_s: float
    ratio: float


class Job(TypedDict):
    """The request, with every default filled in."""

    sequence_length: int
    global_batch: int
    global_batch_tokens: int
    precision: str
    engine: str
    mtp: bool
    offload: bool
    imbalance: float
    objective: str
    fix: str
    forbid: str
    tokens: float | None
    checkpoint_bytes: float
    loading_bytes: float  # host memory of a node
    memory_limit_bytes: float  # of a device
    measured: list[MeasuredStep]
    measured_factor: float


class Search(TypedDict):
    layouts: int
    legal: int
    skipped: int  # slower than the best by a lower bound
    fit: int
    near: float  # share of the best step within which layouts count as equal
    seconds: float


class Order(TypedDict):
    """The splits from the inner tier out."""

    splits: list[str]
    tiers: dict[str, str]
    wire_bytes: dict[str, float]
    usual: bool
    text: str


class Neighbour(TypedDict):
    """The first layout with one change."""

    change: str
    layout: str
    verdict: str  # fits, tight, no or illegal
    step_time_s: float | None
    step_time_ratio: float | None
    peak_memory_bytes: float | None
    reason: str | None  # the rule that an illegal layout breaks


class Change(TypedDict):
    """A change of the machine or the batch."""

    change: str
    text: str
    step_time_ratio: float  # per token


class Remedy(TypedDict):
    change: str
    peak_memory_bytes: float
    fits: bool
    layout: str | None


class NearMiss(TypedDict):
    layout: str
    peak_memory_bytes: float


class Infeasible(TypedDict):
    """Why nothing fits, and what would."""

    limit_bytes: float  # of a device
    closest: list[NearMiss]
    state_bytes: float  # of the whole model
    bounds: list[dict[str, float]]
    smallest_gpus: int | None
    smallest_gpus_to_spare: int | None
    helps: list[Remedy]
    text: list[str]


class PlanResult(TypedDict):
    """What `plan` found. docs/planning.md describes the keys."""

    version: int  # of the keys
    model: Model
    cluster: ClusterFacts
    job: Job
    search: Search
    layouts: list[PlannedLayout]  # the best first
    best_found: PlannedLayout | None  # with `layout`: the best layout of the search
    order: Order | None
    neighbours: list[Neighbour]
    changes: list[Change]
    nothing_fits: Infeasible | None
    notes: list[str]


class ComparedRow(TypedDict):
    """One kind of message, predicted and measured."""

    split: str
    phase: str
    op: str
    group_size: int
    payload_bytes: float
    routed: bool  # the payload is a mean, because the router decides it
    predicted_calls: float
    predicted_bytes: float
    predicted_wire_bytes: float
    measured_calls: float
    measured_bytes: float
    measured_wire_bytes: float
    agrees: bool


class RankRow(ComparedRow):
    """The same of a pipeline rank."""

    pp_rank: int


class MemoryRow(TypedDict):
    kind: str
    predicted_bytes: float
    measured_bytes: float
    agrees: bool


class TracedRank(TypedDict):
    rank: int
    pp_ranks: list[int]  # that have the same layers
    ledger: list[ComparedRow]
    ledger_agrees: bool
    memory: list[MemoryRow]  # the last row is the sum
    memory_agrees: bool
    moment: str  # of the peak


class LayoutResult(TypedDict):
    """What a layout line means."""

    layout: str
    meaning: str
    world_size: int
    global_batch: int  # sequences per step
    degrees: dict[str, int]
    groups: dict[str, list[list[int]]]  # ranks by axis; empty for very large worlds


class TraceResult(TypedDict):
    """Messages and peak memory of ranks, compared with the plan."""

    version: int  # of these keys
    ok: bool
    layout: str
    world_size: int
    global_batch: int
    sequence_length: int
    precision: str
    ranks: list[TracedRank]


class CheckResult(TypedDict):
    """A layout compared with one process and with its plan. None: not a finite number."""

    version: int  # of these keys
    ok: bool
    layout: str
    steps: int
    precision: str
    loss_rel_diff: float | None
    grad_norm_rel_diff: float | None
    max_grad_rel_diff: float | None
    max_weight_abs_diff: float | None
    replicas_identical: bool
    limits: dict[str, float]
    ledger: list[RankRow]
    ledger_differences: list[RankRow]
    memory: list[MemoryRow]


class PartSeconds(TypedDict):
    """A part of a step. None: not predicted, or not measured."""

    part: str
    predicted_s: float | None
    measured_s: float | None


class TrainResult(TypedDict):
    """A run compared with its plan. Predicted values are None if this machine is not calibrated."""

    version: int  # of these keys
    layout: str
    precision: str
    device: str
    steps: int
    step_s: dict[str, float | None]
    seconds: list[PartSeconds]
    memory: dict[str, float | None]
    ledger: list[RankRow]
    ledger_differences: list[RankRow]
