"""What a run reports: a line or a bar on the terminal, a file of metrics, TensorBoard."""

from __future__ import annotations

import ctypes
import json
import math
import resource
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fivefold.errors import UserError
from fivefold.files import atomic_write
from fivefold.train.runfile import Run


@dataclass(frozen=True)
class StepMetrics:
    """One step, a line of metrics.jsonl. The last five are those of `trainer.StepResult`."""

    step: int  # from 1
    lr: float
    seconds: float
    tokens_per_s: float
    loss: float  # mean over the valid tokens of the global batch, in nats
    balance_loss: float
    grad_norm: float
    tokens: int
    skipped: bool


class MetricsFile:
    """JSON lines, one object per step, each written when its step is done."""

    def __init__(self, path: Path, finished_steps: int) -> None:
        """Resume after `finished_steps`: lines of later steps, from before a resume, are removed.
        With 0 the file is emptied."""
        kept = _lines_up_to(path, finished_steps) if finished_steps else []
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, "".join(kept))
        self._file = path.open("a", buffering=1)

    def write(self, metrics: StepMetrics) -> None:
        # JSON has no NaN and no infinity.
        values = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(metrics).items()
        }
        self._file.write(json.dumps(values) + "\n")

    def close(self) -> None:
        self._file.close()


def _lines_up_to(path: Path, step: int) -> list[str]:
    if not path.exists():
        return []
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            keep = line.endswith("\n") and json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError):
            keep = False  # cut off when the run before was killed
        if keep:
            kept.append(line)
    return kept


class Reporter:
    """What rank 0 shows and writes. Every `log_every` steps a line, or on a terminal a bar."""

    def __init__(
        self, run: Run, finished_steps: int, flops_per_step: int, peak_flops_per_s: float | None
    ) -> None:
        """`peak_flops_per_s` is that of all devices together, None where it is not known."""
        self._run, self._first = run, finished_steps + 1
        self._flops_per_step, self._peak_flops_per_s = flops_per_step, peak_flops_per_s
        self._recent: list[StepMetrics] = []  # since the last line
        self._steady_tokens, self._steady_seconds = 0, 0.0  # without the first step
        self._started = time.monotonic()
        self._file = self._board = self._bar = None
        if run.out is not None:
            self._file = MetricsFile(Path(run.out, "metrics.jsonl"), finished_steps)
        if run.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            folder = str(Path(str(run.out), "tensorboard"))
            self._board = SummaryWriter(folder, purge_step=self._first)
        if sys.stdout.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("", completed=finished_steps, total=run.steps)
            self._bar.start()

    def step(self, metrics: StepMetrics) -> None:
        self._recent.append(metrics)
        self._last = metrics
        if metrics.step > self._first:
            self._steady_tokens += metrics.tokens
            self._steady_seconds += metrics.seconds
        if self._file is not None:
            self._file.write(metrics)
        if self._board is not None:
            for name in ("loss", "balance_loss", "grad_norm", "lr", "tokens_per_s"):
                self._board.add_scalar(name, getattr(metrics, name), metrics.step)
        if metrics.step % self._run.log_every and metrics.step < self._run.steps:
            return
        if self._bar is None:
            print(f"step {metrics.step}/{self._run.steps}  {self._numbers()}", flush=True)
        else:
            self._bar.update(self._task, completed=metrics.step, description=self._numbers())
        self._recent.clear()

    def _numbers(self) -> str:
        """The last step's numbers, and the speed since the last line."""
        last = self._recent[-1]
        seconds = sum(metrics.seconds for metrics in self._recent)
        tokens = sum(metrics.tokens for metrics in self._recent)
        numbers = [f"loss {last.loss:.4f}"]
        if last.balance_loss:
            numbers.append(f"balance {last.balance_loss:.4f}")
        numbers += [f"norm {last.grad_norm:.3g}", f"lr {last.lr:.3g}"]
        numbers.append(f"{tokens / seconds:,.0f} tokens/s")
        if self._peak_flops_per_s is not None:
            speed = self._flops_per_step * len(self._recent) / seconds
            numbers.append(f"MFU {speed / self._peak_flops_per_s:.1%}")
        skipped = sum(metrics.skipped for metrics in self._recent)
        if skipped:
            numbers.append(f"{skipped} skipped: the gradient was not finite")
        return "  ".join(numbers)

    def finish(self, peak_memory_bytes: int) -> None:
        """One line that sums the run up. Its speed leaves out the first step, which warms up."""
        last, tokens, seconds = self._last, self._steady_tokens, self._steady_seconds
        if not tokens:
            tokens, seconds = last.tokens, last.seconds
        done = (
            f"step {last.step}"
            if last.step == self._first
            else f"steps {self._first} to {last.step}"
        )
        print(
            f"{done} in {time.monotonic() - self._started:.1f} s: loss {last.loss:.4f}, "
            f"{tokens / seconds:,.0f} tokens/s, "
            f"peak memory {peak_memory_bytes / 1e6:,.0f} MB per rank",
            flush=True,
        )

    def close(self) -> None:
        self._stop_bar()
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar() -> Progress:
    return Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=20),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        refresh_per_second=2,  # each refresh takes a few milliseconds from rank 0
    )


def check_tensorboard(run: Run) -> None:
    """Raises UserError if TensorBoard is requested and not installed."""
    if run.tensorboard and find_spec("tensorboard") is None:
        raise UserError(
            "tensorboard: true needs the package tensorboard, which is not installed: "
            "pip install tensorboard, or set tensorboard to false"
        )


PEAK_FLOPS_PER_S: dict[str, dict[str, float]] = {
    # Dense matrix products, from the makers' data sheets. fp32 is without TF32, as torch
    # computes it by default. A longer name comes before its beginning.
    "A100": {"bf16": 312e12, "fp32": 19.5e12},
    "H100 PCIe": {"bf16": 756e12, "fp32": 51e12},
    "H100": {"bf16": 989e12, "fp32": 67e12},
    "H200": {"bf16": 989e12, "fp32": 67e12},
    "B200": {"bf16": 2250e12, "fp32": 75e12},
    "L40S": {"bf16": 362e12, "fp32": 91.6e12},
    "MI300X": {"bf16": 1307e12, "fp32": 163.4e12},
}


def peak_flops_per_s(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of one device, by torch.cuda.get_device_name; None if it is not known."""
    for name, peak in PEAK_FLOPS_PER_S.items():
        if name in device_name:
            return peak[precision]
    return None


def begin_peak_memory() -> int:
    """Reset the peak, where the system allows it. Returns the bytes this process has now."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    _give_back_freed_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the resident peak
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux, or not allowed: the peak so far stands for it
        return peak_memory_bytes()
    return pages * resource.getpagesize()


def _give_back_freed_memory() -> None:
    """Return to the system what the C library has kept, for example of tokenizing: tensors would
    take its place, and the process would not be seen to grow."""
    if sys.platform == "linux":
        c_library = ctypes.CDLL(None)
        if hasattr(c_library, "malloc_trim"):  # musl has none
            c_library.malloc_trim(0)


def peak_memory_bytes() -> int:
    """Peak memory of this process: what tensors took on its GPU, else resident memory."""
    import torch

    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
