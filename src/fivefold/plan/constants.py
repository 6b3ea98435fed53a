"""The planner's measured and assumed numbers that belong to no device: value, unit, source.

Those of a device are in cluster/constants.yaml, those of a training program in `engines`, those of
memory in `memory.engine_rank`.
"""

# Matrix products

TILE_ROWS, TILE_COLUMNS = 128, 256
"""Elements: the usual tile of a large product (NVIDIA, "Matrix Multiplication Background User's
Guide", which has the waves and tiles of `time.accelerator` too)."""
ALIGNED = 64
"""Elements of a row that the fastest kernels load at once: 128 bytes of 16 bits (same guide)."""

# Attention

NARROW = 52
"""Elements per head: attention with heads of d elements takes 1 + NARROW / d times as long as with
wide ones. FlashAttention-3 reaches 497 TFLOP/s with 64 elements and 640 with 128, forward and
causal (arXiv:2407.08608, figure 5)."""
ATTENTION_BACKWARD_PRODUCTS = 2.5
"""FLOPs of attention's backward pass per FLOP of its forward pass (FlashAttention-2,
arXiv:2307.08691, section 4.1)."""
ATTENTION_BACKWARD = 0.75
"""Speed of attention's backward pass over that of its forward pass: about 480 of 640 TFLOP/s with
FlashAttention-3 on long sequences (arXiv:2407.08608, figures 5 and 6)."""
KEYS_AT_A_TIME = 512
"""Keys: PyTorch's attention on CPUs takes them in blocks of so many, and skips the blocks that a
causal mask hides completely (kvSplitSize in aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""

# Kernels and passes over memory

ATTENTION_KERNELS, MLP_KERNELS, HEAD_KERNELS = 14.0, 4.0, 12.0
ROUTING_KERNELS, EXPERT_KERNELS, QUANTIZED_EXPERT_KERNELS = 46.0, 4.0, 12.0
"""Kernels that a forward pass launches in the parts of a layer and per local expert: assumed, about
what profiles of such layers show. They matter where the host cannot keep ahead."""
EXPERT_PASSES = 6.4
"""Passes over the copies of tokens: copied per expert, put in the experts' order where they arrive
and back, and summed at home. No source is on record for it or for the two below."""
EXPERT_PASSES_ONCE_A_NODE = 4.0
"""The same where the dispatcher does the first copy and the sum on the way."""
EXPERT_PASSES_FUSED = 3.0
"""The same where kernels read and write in the experts' order."""
ZERO_PASSES = 4
"""How often ZeRO reads or writes what it gathers or reduces on a CPU, besides the message: FSDP2
copies a unit's weights out of the buffer that they arrive in, and gradients into the one that they
leave from."""

# The host

GRAPHED_STEP = 0.2
"""Share of the host's time between steps that is left where a graph replays whole steps: assumed,
what small steps of MLPerf's 8B runs leave for it."""
HOST_BANDWIDTH = 40e9
"""Bytes/s of host memory per device, where the host runs the optimizer: assumed, two sockets of
about 160 GB/s in use for 8 devices. Gradients and weights cross PCIe at the same time."""
