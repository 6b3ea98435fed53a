"""The CUDA kernels' calls on tensors without data: names, arguments and shapes, not values."""

from __future__ import annotations

import pytest
import torch

from fivefold.parallel.context import flash


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("causal", "masked"), [(True, False), (False, False), (False, True)])
def test_a_block_and_its_gradients_have_the_shapes_of_their_inputs(
    dtype: torch.dtype, causal: bool, masked: bool
) -> None:
    with torch.device("meta"):
        q = torch.empty(2, 8, 64, 32, dtype=dtype)
        k, v = torch.empty(2, 2, 64, 32, dtype=dtype), torch.empty(2, 2, 64, 32, dtype=dtype)
        mask = torch.empty(2, 1, 64, 64, dtype=torch.bool) if masked else None
    out, lse = flash._cuda_forward(q, k, v, causal, mask)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    gradients = flash._cuda_backward(out, q, k, v, out, lse, causal, mask)
    assert [each.shape for each in gradients] == [q.shape, k.shape, v.shape]


def test_fp32_goes_to_the_kernel_that_takes_it(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("flash attention on CUDA takes 16-bit floats only")

    class Without:
        _scaled_dot_product_flash_attention = staticmethod(refuse)
        _scaled_dot_product_efficient_attention = (
            torch.ops.aten._scaled_dot_product_efficient_attention
        )

    monkeypatch.setattr(flash, "_aten", Without)
    q = torch.empty(1, 2, 32, 32, device="meta")
    out, _ = flash._cuda_forward(q, q, q, True, None)
    assert out.shape == q.shape
    with pytest.raises(AssertionError, match="16-bit"):
        flash._cuda_forward(q.bfloat16(), q.bfloat16(), q.bfloat16(), True, None)
