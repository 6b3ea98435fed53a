from __future__ import annotations

import pytest

from fivefold.calibrate.grid import CPU, GPU, Grid, fitting, quick


@pytest.mark.parametrize("grid", [CPU, GPU])
def test_a_quick_look_has_fewer_of_everything(grid: Grid) -> None:
    few = quick(grid)
    for name in vars(grid):
        if name == "patience_s":
            assert few.patience_s < grid.patience_s
        else:
            assert 0 < len(getattr(few, name)) < len(getattr(grid, name)), name
            assert set(map(str, getattr(few, name))) <= set(map(str, getattr(grid, name)))


@pytest.mark.parametrize("name", ["products", "short_products", "light", "losses"])
def test_no_size_is_there_twice(name: str) -> None:
    for grid in (CPU, GPU):
        assert len(set(getattr(grid, name))) == len(getattr(grid, name))


def test_a_small_device_measures_what_it_has_room_for() -> None:
    assert fitting(GPU, 80e9) == GPU
    small = fitting(GPU, 8e9)
    assert (16384, 16384, 16384) not in small.products and (2048, 2048, 2048) in small.products
    assert 0 < len(small.blocks) < len(GPU.blocks)
    assert small.message_bytes == GPU.message_bytes  # or ranks of other nodes would wait
    assert fitting(CPU, 2e9) == CPU
    assert fitting(CPU, 1.0).losses == CPU.losses[:1]  # something of every kind is left
