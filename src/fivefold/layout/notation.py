"""A layout: one complete choice of how training is split, and its one line of text.

    tp4 sp pp2 vpp2 dp8 zero1 ep4 ulysses2 ring2 mb1 ga16 recompute=selective

`parse` reads such a line and `str` writes it; they are each other's inverse. Whether a layout can
run on a given model and number of devices is the business of `legality`.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from fivefold.errors import UserError
from fivefold.layout.actions import ActionTable, is_table_file
from fivefold.layout.degrees import ORDER, PLANNED_SCHEDULES, RECOMPUTE, SCHEDULES, Degrees
from fivefold.text import (
    divisors,
    join_or,
    nearest_choices,
    nearest_multiples,
    product,
)


@dataclass(frozen=True)
class Layout(Degrees):
    """One complete choice of how training is split. What is left out has its default.

    The number of ranks is `world_size = dp * pp * tp * cp`. Within a pipeline stage the ranks
    are shared out a second time for the experts: `etp * ep * edp = tp * cp * dp`.
    """

    tp: int = 1  # tensor parallel degree
    sp: bool = False  # megatron sequence parallelism: activations split over the tp ranks
    pp: int = 1  # pipeline stages
    vpp: int = 1  # chunks of layers a pipeline rank (1f1b with more than 1: interleaved 1F1B)
    dp: int = 1  # data parallel degree, dp_replicate * dp_shard
    dp_replicate: int = 1  # groups of the dp ranks that only replicate (HSDP)
    zero: int = 0  # ZeRO stage, 0 to 3
    ep: int = 1  # expert parallel degree
    etp: int = 1  # tensor parallel degree inside an expert, 1 or tp
    ulysses: int = 1  # sequence split exchanged for a head split around attention
    ring: int = 1  # sequence split with K and V travelling round a ring
    micro_batch: int = 1  # sequences a micro-batch on one dp rank ("mb")
    accumulation: int = 1  # micro-batches a step on one dp rank ("ga")
    recompute: str = "none"  # "none", "selective" (attention only) or "full" (whole layers)
    recompute_layers: int = 0  # of "full": the first N layers of each virtual stage; 0 = all
    schedule: str = "1f1b"  # one of the schedules above, or the path of a table (`actions`)
    order: tuple[str, ...] = ORDER  # rank order, innermost first
    layers: tuple[int, ...] | None = None  # layers of each virtual stage, in model order
    table: ActionTable | None = field(default=None, compare=False, repr=False)
    """What the file that `schedule` names has; whoever reads files puts it in."""

    def __str__(self) -> str:
        """The line of text that `parse` reads, in one fixed order and without defaults."""
        changed = (name for name in PRINTED if _value(self, name) != _value(DEFAULTS, name))
        return " ".join(_token(name, _value(self, name)) for name in changed) or "dp1"

    def describe(self) -> str:
        """The number of devices as a product, in the form of the ranks and in the textbook's.

        The textbook's DP x PP x TP x EP counts only the data parallelism left to the experts:
        `64 devices = pp 2 x tp 4 x dp 8 (= edp 2 x ep 4)`.
        """
        notes: dict[str, list[str]] = {"tp": [], "pp": [], "cp": [], "dp": []}
        if self.cp > 1:
            notes["cp"].append(product({"ulysses": self.ulysses, "ring": self.ring}))
        if self.dp_replicate > 1:
            notes["dp"].append(f"dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard}")
        # What ep and edp share out; tp is part of it where experts are kept whole (etp 1).
        shared = {"tp": self.tp // self.etp, "cp": self.cp, "dp": self.dp}
        experts = f"edp {self.edp} x ep {self.ep}"
        experts_stand_out = self.ep > 1 or self.etp > 1
        dp_is_shared_alone = shared["tp"] == shared["cp"] == 1
        if experts_stand_out and dp_is_shared_alone:
            notes["dp"].append(experts)

        degrees = {name: getattr(self, name) for name in ("pp", "tp", "cp", "dp")}
        factors = [
            f"{name} {degree}" + "".join(f" (= {note})" for note in notes[name])
            for name, degree in degrees.items()
            if degree > 1 or notes[name]
        ]
        text = f"{self.world_size} devices = {' x '.join(factors)}" if factors else "1 device"
        if experts_stand_out and not dp_is_shared_alone:
            text += f"; for the experts {product(shared)} (= {experts})"
        return text


DEFAULTS = Layout()

DEGREES = ("pp", "vpp", "dp", "dp_replicate", "zero", "ep", "etp", "ulysses", "ring", "mb", "ga")
PRINTED = ("tp", "sp", *DEGREES, "recompute", "schedule", "order", "layers")
NUMBERS = ("tp", *DEGREES, "edp")
FORMS = {
    "tp": "tpN",
    "sp": "sp",
    **{name: f"{name}N" for name in (*DEGREES, "edp")},
    "recompute": "recompute=none|selective|full|full:N",
    "schedule": "schedule=" + "|".join((*SCHEDULES, "interleaved", *PLANNED_SCHEDULES, "FILE.csv")),
    "order": "order=" + "-".join(ORDER),
    "layers": "layers=N,N*times,N",
}
"""How each token is written, by its name. `edp` may stand in place of `dp`."""

FIELDS = {"mb": "micro_batch", "ga": "accumulation"}
"""The tokens that are shorter than the name of their field."""

LARGEST = 1_000_000
"""No degree or count is larger, so that a slip of the keyboard cannot fill the memory."""


# Reading


def parse(text: str, world_size: int | None = None) -> Layout:
    """The layout that one line of text states.

    With `world_size`, the number of devices, dp may be left out and is derived; a dp that was
    stated must fit. UserError for text that states no layout or one for another world size.
    """
    values = _read(text)
    edp = values.pop("edp", None)
    if "recompute" in values:
        values["recompute"], values["recompute_layers"] = values["recompute"]
    interleaved = values.get("schedule") == "interleaved"
    if interleaved:
        values["schedule"] = "1f1b"
    layout = Layout(**{FIELDS.get(name, name): value for name, value in values.items()})
    if interleaved and layout.vpp < 2:
        raise UserError(
            "schedule=interleaved needs 2 or more chunks of layers a pipeline rank, not vpp 1: "
            "add vpp2, or write schedule=1f1b"
        )
    if edp is not None:
        layout = _with_edp(layout, edp, dp_stated="dp" in values)
    if world_size is not None:
        if "dp" not in values and edp is None:
            derived = world_size // (layout.tp * layout.pp * layout.cp)
            layout = replace(layout, dp=max(1, derived))
        if error := world_size_error(layout, world_size):
            raise UserError(error)
    return _with_whole_order(layout)


def stated(text: str) -> frozenset[str]:
    """The names of the tokens that a line of text states, such as {"tp", "mb"}."""
    return frozenset(_read(text))


def _read(text: str) -> dict[str, Any]:
    """The value of each token stated, by the token's name."""
    values: dict[str, Any] = {}
    for token in re.sub(r"\s*([>,])\s*", r"\1", text).split():
        names_file = token.lower().startswith("schedule=") and is_table_file(token)
        name, value = _read_token(token if names_file else token.lower())
        if name in values:
            raise UserError(f"layout token {name} is stated twice: keep one of them")
        values[name] = value
    return values


def _read_token(token: str) -> tuple[str, Any]:
    name, equals, value = token.partition("=")
    if equals and name.lower() == "schedule" and is_table_file(value):
        return "schedule", value
    if equals and name in ("recompute", "schedule", "order", "layers"):
        return name, _read_value(name, value)
    match = re.fullmatch(r"([a-z_]+)(-?[0-9]*)", token)
    name = match[1] if match else name
    if token == "sp":
        return "sp", True
    if name == "sp":
        raise UserError(f"{token!r} gives sp a degree, but sp takes its degree from tp: write sp")
    if name == "cp":
        raise UserError(
            f"{token!r} does not say how the sequence is split: write ulyssesN, ringN or both "
            "(cp is their product)"
        )
    if name not in FORMS:
        raise UserError(_unknown(token))
    if match is None or not match[2] or match[2] == "-":
        example = FORMS[name].replace("N", "2") if name in NUMBERS else FORMS[name]
        raise UserError(f"layout token {token!r} is not complete: write it like {example}")
    return name, _zero_stage(match[2]) if name == "zero" else _number(name, match[2])


def _read_value(name: str, value: str) -> Any:
    if name == "order":
        return _read_order(value)
    if name == "layers":
        return _read_layers(value)
    if name == "recompute":
        return _read_recompute(value)
    if value not in _choices(name):
        raise UserError(f"{name}={value} is not known: {name} may be {join_or(_choices(name))}")
    return value


def _choices(name: str) -> tuple[str, ...]:
    if name == "recompute":
        return RECOMPUTE
    return (*SCHEDULES, "interleaved", *PLANNED_SCHEDULES)


def _number(name: str, digits: str) -> int:
    """A degree or count."""
    # The length is looked at first: int() refuses thousands of digits in its own words.
    number = int(digits) if len(digits) <= 20 else LARGEST + 1
    if number < 1:
        raise UserError(f"{name} must be 1 or more, not {number}")
    if number > LARGEST:
        raise UserError(f"{name} {digits[:20]} is too large: the most is {LARGEST}")
    return number


def _zero_stage(digits: str) -> int:
    if digits not in ("0", "1", "2", "3"):
        raise UserError(f"zero{digits[:20]} is not a ZeRO stage: zero0 to zero3 are")
    return int(digits)


def _read_order(value: str) -> tuple[str, ...]:
    """The axes named, innermost first, joined by `-`, or by `,` or `>`."""
    axes = tuple(re.split("[-,>]", value))
    if len(set(axes)) < len(axes) or not set(axes) <= set(ORDER):
        raise _order_error(value)
    return axes


def _order_error(value: str) -> UserError:
    return UserError(
        f"order={value} must name each of {', '.join(ORDER)} once, innermost first (those of "
        f"degree 1 may be left out): the default is order={'-'.join(ORDER)}"
    )


def _with_whole_order(layout: Layout) -> Layout:
    """The layout with the axes that `order=` left out; UserError unless their degrees are 1."""
    missing = [axis for axis in ORDER if axis not in layout.order]
    if any(getattr(layout, axis) > 1 for axis in missing):
        raise _order_error("-".join(layout.order))
    if layout.order == tuple(axis for axis in ORDER if axis in layout.order):
        return replace(layout, order=ORDER)
    return replace(layout, order=(*layout.order, *missing))


def _read_layers(value: str) -> tuple[int, ...]:
    """`7,8*14,7`: a stage of 7 layers, fourteen of 8, one of 7."""
    layers: list[int] = []
    for part in value.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\*([0-9]+))?", part)
        if match is None:
            raise UserError(f"{part!r} in layers={value} is no number of layers: write 8 or 8*14")
        layers += [_number("layers of a stage", match[1])] * _number("stages", match[2] or "1")
    return tuple(layers)


def _read_recompute(value: str) -> tuple[str, int]:
    """`full:4`: the first four layers of each virtual stage; without a number, all of them."""
    mode, colon, layers = value.partition(":")
    if mode not in RECOMPUTE:
        raise UserError(f"recompute={value} is not known: recompute may be {join_or(RECOMPUTE)}")
    if not colon:
        return mode, 0
    if mode != "full" or not layers.isdecimal():
        raise UserError(
            f"recompute={value} is not known: the first 4 layers of a stage are recompute=full:4"
        )
    return mode, _number("recomputed layers", layers)


def _unknown(token: str) -> str:
    if "," in token:
        return f"layout tokens are separated by spaces, not commas: {token!r}"
    words = dict(FORMS)
    for name in ("recompute", "schedule"):
        words |= {value: f"{name}={value}" for value in _choices(name)}
    word = re.sub(r"-?[0-9]+$", "", token)
    near = difflib.get_close_matches(word, words, n=1)
    if near:
        return f"unknown layout token {token!r}: did you mean {words[near[0]]}?"
    return f"unknown layout token {token!r}: known are {', '.join(FORMS.values())}"


def _with_edp(layout: Layout, edp: int, dp_stated: bool) -> Layout:
    """The layout whose experts have `edp` copies: dp = etp * ep * edp / (tp * cp)."""
    ranks = layout.tp * layout.cp
    experts = layout.etp * layout.ep
    if edp * experts % ranks:
        unit = ranks // math.gcd(ranks, experts)
        raise UserError(
            f"etp {layout.etp} x ep {layout.ep} x edp {edp} = {edp * experts} is not a multiple of "
            f"tp {layout.tp} x cp {layout.cp} = {ranks}: edp may be {nearest_multiples(edp, unit)}"
        )
    dp = edp * experts // ranks
    if dp_stated and dp != layout.dp:
        raise UserError(
            f"dp {layout.dp} and edp {edp} contradict each other, for etp {layout.etp} x "
            f"ep {layout.ep} x edp {edp} = tp {layout.tp} x cp {layout.cp} x dp {dp}: leave out dp"
        )
    return replace(layout, dp=dp)


# Fitting a layout to the number of devices


def world_size_error(layout: Layout, world_size: int) -> str | None:
    """What is wrong when the layout's ranks are not as many as the devices, else None."""
    if layout.world_size == world_size:
        return None
    if world_size < 1:
        return f"the number of devices must be 1 or more, not {world_size}"
    degrees = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
    model_ranks = math.prod(degrees.values())
    wrong = (
        f"{product({**degrees, 'dp': layout.dp})} = {layout.world_size} ranks, "
        f"but the number of devices is {world_size}"
    )
    if world_size % model_ranks == 0:
        return f"{wrong}: dp {world_size // model_ranks} would fit"
    return (
        f"{wrong}: tp x pp x cp = {model_ranks} must divide it "
        f"({nearest_choices(divisors(world_size), model_ranks)}); "
        f"{nearest_multiples(world_size, model_ranks)} devices would fit"
    )


# Writing


def _value(layout: Layout, name: str) -> Any:
    if name == "recompute" and layout.recompute_layers:
        return f"{layout.recompute}:{layout.recompute_layers}"
    return getattr(layout, FIELDS.get(name, name))


def _token(name: str, value: Any) -> str:
    if name == "sp":
        return name
    if name == "order":
        return "order=" + "-".join(value)
    if name == "layers":
        return "layers=" + ",".join(_run(layers, len(list(run))) for layers, run in groupby(value))
    return f"{name}{value}" if name in NUMBERS else f"{name}={value}"


def _run(layers: int, times: int) -> str:
    return min(",".join([str(layers)] * times), f"{layers}*{times}", key=len)
