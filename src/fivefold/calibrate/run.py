"""`fivefold calibrate`: from the machine at hand to its cluster file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from fivefold.calibrate.clusterfile import as_text, check_writable, write
from fivefold.calibrate.cores import Floats, fit_cpu, pass_errors
from fivefold.cluster.host import here_path
from fivefold.cluster.load import cluster_of
from fivefold.errors import UserError
from fivefold.train.torchrun import joined_by_torchrun, processes_of_torchrun

PROCESSES = 8
"""Of a CPU, unless told otherwise: groups of 2, 4 and 8."""
MOST_PROCESSES = 256


@dataclass(frozen=True)
class Calibrated:
    """What was written, and how well it fits."""

    path: Path
    summary: str
    errors: dict[str, Floats]
    """Relative, of the rates that were fitted, by kind of pass; nothing is fitted on a GPU."""


def calibrate(out: str | None, processes: int | None, quick: bool) -> Calibrated | None:
    """Measure this machine and write its cluster file (`here_path`, unless `out` names another).

    Starts local processes itself (a GPU each; on a CPU `PROCESSES` unless told otherwise); under
    torchrun it joins those that torchrun started, and only rank 0 has a result. Raises UserError
    where it cannot measure or write.
    """
    if find_spec("torch") is None:
        raise UserError("measuring needs torch: pip install 'fivefold[train]'")
    path = here_path() if out is None else Path(out)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {out} must end in .yaml, as the name of every cluster file does")
    joined = joined_by_torchrun()
    _check_processes(processes, joined)
    check_writable(path)

    import torch

    from fivefold.calibrate import grid
    from fivefold.calibrate.device import head
    from fivefold.calibrate.measure import measure_joined, measure_locally

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = grid.GPU if device == "cuda" else grid.CPU
    sizes = grid.quick(sizes) if quick else sizes
    if joined:
        measured = measure_joined(sizes, device)
        if measured is None:
            return None
    else:
        usual = PROCESSES if device == "cpu" else torch.cuda.device_count()
        measured = measure_locally(sizes, device, processes or usual)
    top, errors = head(measured), dict[str, Floats]()
    if device == "cpu":  # a GPU is described by the constants of its device
        machine = cluster_of(top, "here", "here", measured.processes)
        cpu = fit_cpu(machine, measured.cores, measured.points)
        errors = pass_errors(measured.points, replace(machine, cpu=cpu))
        top["cpu"] = cpu.model_dump(exclude_defaults=True)
    write(path, as_text({**top, "points": [point.record() for point in measured.points]}))
    return Calibrated(path, top["summary"], errors)


def _check_processes(processes: int | None, joined: bool) -> None:
    if processes is not None and not 1 <= processes <= MOST_PROCESSES:
        raise UserError(f"--processes must lie between 1 and {MOST_PROCESSES}, not {processes}")
    if joined and processes not in (None, processes_of_torchrun()):
        raise UserError(
            f"torchrun started {processes_of_torchrun()} processes and --processes says "
            f"{processes}: leave it out"
        )
