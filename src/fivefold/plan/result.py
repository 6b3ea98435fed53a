"""The planner's answer: the best layouts, or the one that was asked about, with the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fivefold.errors import UserError
from fivefold.plan import explain
from fivefold.plan.estimate import Estimate, estimate
from fivefold.plan.explain import Change, Justification, Order
from fivefold.plan.infeasible import Infeasible, infeasible
from fivefold.plan.intervals import MeasurementCalibration, calibrate_with_measurements
from fivefold.plan.neighbours import Neighbour, neighbours
from fivefold.plan.planfile import PlanFile, Predicted, refuse_unwritable
from fivefold.plan.request import PlanRequest
from fivefold.plan.search.search import Search, search
from fivefold.plan.wording import available, gb

OUTLIER = 3.0
"""A measured step this many times longer or shorter than predicted gets a warning."""


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was measured, and its prediction."""

    layout: str
    step_time_s: float
    predicted_step_time_s: float
    ratio: float


@dataclass(frozen=True)
class PlannedLayout:
    """A layout of the answer, and why it is as good as it is."""

    estimate: Estimate
    why: list[Justification] = field(default_factory=list)


@dataclass(frozen=True)
class PlanResult:
    """The answer to a request. `fivefold.plan.result_json` has its stable form."""

    request: PlanRequest
    search: Search
    limit_bytes: float  # of a device, which the verdicts are about
    measured: list[MeasuredStep]
    measured_factor: float  # by which all predicted times are multiplied
    layouts: list[PlannedLayout]  # best first, or the one that was asked about
    best_found: PlannedLayout | None  # where one was asked about
    order: Order | None  # of the first layout, like the following
    neighbours: list[Neighbour]
    changes: list[Change]
    nothing_fits: Infeasible | None
    notes: list[str]

    @property
    def fits(self) -> bool:
        """Does the first layout fit?"""
        return bool(self.layouts) and self.layouts[0].estimate.verdict != "no"

    def plan_file(self) -> PlanFile:
        """The first layout as a plan file. UserError where there is none."""
        request, job = self.request, self.request.job
        assert request.model is not None, "see refuse_unsavable"
        if not self.layouts:
            raise UserError("nothing fits: there is no plan to save")
        first = self.layouts[0].estimate
        return PlanFile(
            layout=str(first.layout),
            model=request.model,
            cluster=request.cluster,
            gpus=first.layout.world_size,
            gpus_per_node=job.cluster.tiers[0].size or 8,
            sequence_length=job.sequence_length,
            global_batch=job.global_batch,
            precision=job.precision,  # pyright: ignore[reportArgumentType]  # pydantic checks it
            mtp=job.mtp,
            predicted=Predicted(
                step_time_s=first.step_time_s,
                tokens_per_s_per_device=first.tokens_per_s_per_device,
                mfu=first.mfu,
                peak_memory_bytes=first.peak_memory_bytes,
            ),
        )


def refuse_unsavable(request: PlanRequest, path: str) -> None:
    """UserError for a plan that could not be saved, whatever the answer is."""
    if request.model is None:
        raise UserError(
            "a model that only Megatron's arguments describe cannot be saved: describe it with "
            "--dims, and give --layout"
        )
    refuse_unwritable(path)


def make_plan(request: PlanRequest) -> PlanResult:
    """Search, or evaluate the one layout that is asked about, and explain."""
    job, constraints = request.job, request.constraints
    found = search(job, constraints)
    measured = list(_measured(request))
    calibration = calibrate_with_measurements(
        [(each.step_time_s, each.predicted_step_time_s) for each in measured]
    )
    best = [_calibrated(request, each, calibration) for each in found.best]
    if request.measured and constraints.objective == "time":
        best.sort(key=lambda each: each.step_time_s)  # what was measured replaces a prediction
    chosen, limit = best, found.limit_bytes
    if request.layout is not None:
        chosen = [_calibrated(request, estimate(job, request.layout), calibration)]
        if chosen[0].verdict == "tight":
            limit = constraints.memory_bytes(job)
    result = PlanResult(
        request=request,
        search=found,
        limit_bytes=limit,
        measured=measured,
        measured_factor=calibration.factor,
        layouts=[PlannedLayout(each) for each in chosen],
        best_found=PlannedLayout(best[0]) if best and request.layout is not None else None,
        order=None,
        neighbours=[],
        changes=[],
        nothing_fits=None if best else infeasible(job, constraints, limit, found.closest),
        notes=[*request.notes, *found.notes, *outlier_warnings(measured)],
    )
    return _explained(result) if chosen else result


def _measured(request: PlanRequest) -> Iterator[MeasuredStep]:
    for layout, measured_s in request.measured:
        predicted_s = estimate(request.job, layout).step_time_s
        yield MeasuredStep(str(layout), measured_s, predicted_s, measured_s / predicted_s)


def outlier_warnings(measured: list[MeasuredStep]) -> Iterator[str]:
    """A sentence for each measured step that is far from its prediction."""
    for each in measured:
        if not 1 / OUTLIER <= each.ratio <= OUTLIER:
            yield (
                f"the measured step of {each.layout} is {each.ratio:.3g} times the predicted one: "
                "check that the measured run had this batch, sequence length and precision"
            )


def _calibrated(
    request: PlanRequest, each: Estimate, calibration: MeasurementCalibration
) -> Estimate:
    """The estimate with what the request says of it: a layout that was measured takes what was
    measured, the others are calibrated. Its verdict is by the request's limit."""
    measured = [seconds for layout, seconds in request.measured if layout == each.layout]
    if measured:
        low, high = min(measured), max(measured)
        factor = sum(measured) / len(measured) / each.step_time_s
    else:
        job, factor = request.job_of(each.layout), calibration.factor
        low, high = calibration.interval(job, each.layout, each.step_time_s)
    verdict = request.constraints.verdict(request.job, each.peak_memory_bytes)
    return replace(_scaled(each, factor, low, high), verdict=verdict)


def _scaled(each: Estimate, factor: float, low: float, high: float) -> Estimate:
    """The estimate with all its seconds times a factor; `low` and `high` are its interval."""
    rates = ("tokens_per_s_per_device", "model_flops_per_s_per_device", "mfu", "mfu_full_attention")
    return replace(
        each,
        step_time_s=each.step_time_s * factor,
        step_time_low_s=low,
        step_time_high_s=high,
        **{name: getattr(each, name) / factor for name in rates},
        seconds={name: seconds * factor for name, seconds in each.seconds.items()},
        stages=[
            replace(stage, forward_s=stage.forward_s * factor, backward_s=stage.backward_s * factor)
            for stage in each.stages
        ],
        ledger=[
            replace(row, time_s=row.time_s * factor, exposed_s=row.exposed_s * factor)
            for row in each.ledger
        ],
    )


def _explained(result: PlanResult) -> PlanResult:
    """The first layout compared with what it could be instead, the others with the first."""
    request, limit = result.request, result.limit_bytes
    first, *others = (each.estimate for each in result.layouts)
    job = request.job_of(first.layout)
    around = neighbours(job, first.layout, limit)
    why = [
        *_comparison(result, first),
        *explain.justify_splits(job, first.layout, limit),
    ]
    compared = [
        PlannedLayout(other, [explain.difference("the first", first, other)]) for other in others
    ]
    return replace(
        result,
        layouts=[PlannedLayout(first, why), *compared],
        order=explain.found_order(first.ledger, [tier.name for tier in job.cluster.tiers]),
        neighbours=[_neighbour(request, first, each) for each in around],
        changes=explain.changes(job, first.layout, around, limit),
    )


def _neighbour(request: PlanRequest, first: Estimate, each: Neighbour) -> Neighbour:
    """With calibrated seconds, and the verdict that it would get if it was asked about."""
    if each.step_time_ratio is None or each.peak_memory_bytes is None:
        return each
    asked = request.constraints.verdict(request.job, each.peak_memory_bytes)
    verdict = "tight" if (each.verdict, asked) == ("no", "tight") else each.verdict
    return replace(each, step_time_s=each.step_time_ratio * first.step_time_s, verdict=verdict)


def _comparison(result: PlanResult, asked: Estimate) -> Iterator[Justification]:
    """Of a layout that was asked about: how it compares with the best, and whether it fits."""
    if result.request.layout is None:
        return
    if result.best_found is not None:
        best = result.best_found.estimate
        if best.layout == asked.layout:
            yield Justification("layout", "This is the best layout that the search found.")
        else:
            yield explain.difference(f"the best found ({best.layout})", best, asked)
    if asked.verdict == "no":
        peak = asked.peak_memory_bytes
        needs = f"pipeline rank {asked.worst_stage} needs {gb(peak)}"
        text = f"It does not fit: {needs}; {available(result.limit_bytes)}."
        yield Justification("memory", text, peak)
