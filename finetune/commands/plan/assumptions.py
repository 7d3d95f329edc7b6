"""The assumptions of the cost model and of the outlook, with units and sources.

Figures of a GPU, such as its bandwidths, are in `finetune/runtime/gpu_specifications.yaml`.
"""

# Computation

TRAINING_SHARE = 0.8
"""Share of the speed of the largest matrix products that all products of a model but attention's reach. Fitted to half
of llm-foundry's published runs with attention's shares (`attention_share` in the table of GPUs) by
`benchmarks/plan_published.py --fit`; the other half and other sources are in docs/how-to/planning.md."""

FP8_SAVED_SHARE = 0.37
"""Share of the time of a linear layer's products that 8 bits save: half, less the casts and the search for scales.
Chosen so that torchtitan's gain (benchmarks/llama3_h100, Llama-3-8B: 6,667 to 8,532 tokens/s) is that of the model."""

TRAFFIC_PER_INTERMEDIATE = 30.0
"""Bytes that the gated activation of a layer reads and writes per token and unit of the MLP's width, forward and
backward; the other kernels between matrix products are counted in `finetune.model.kernels.compilation`."""

ADAPTED_TRAFFIC_PER_FEATURE = 13.0
"""Bytes per token and input or output feature of an adapted layer: a float32 copy of its input, a sum at its output."""

HOST_SECONDS_PER_LAYER = 1.2e-3
"""Time to launch the kernels of a layer's forward and backward pass from Python, without torch.compile."""

HOOK_SECONDS_PER_LAYER = {"fsdp2": 0.4e-3, "hsdp": 0.4e-3, "zero3": 1e-3, "zero3_offload": 1e-3}
"""Host time to gather and free a layer's weights."""

UPDATE_BYTES = 36.0
"""Bytes read and written per parameter by clipping and AdamW in float32: weight, gradient and two moments."""

HOST_UPDATE_BYTES = 30.0
"""The same on the host, by DeepSpeedCPUAdam."""

STRAGGLER_NOISE = 0.036
"""Standard deviation of the time that one rank computes in a step, as a share of it: clocks, temperatures, the host.
The one number fitted to published scaling; `python benchmarks/scaling.py --fit` repeats the fit without each source."""

STRAGGLER_FREE_RANKS = 8
"""The largest number of ranks of the runs that determined TRAINING_SHARE, which includes their stragglers."""

# Communication

LINK_SHARE = {"NVLink": 0.8, "Infinity Fabric": 0.7, "PCIe": 0.4, "network": 0.8}
"""Share of a link's bandwidth that a collective reaches: NCCL's bus bandwidth on 8 GPUs is about 360 of 450 GB/s on an
H100 and 235 of 300 on an A100; over PCIe, ranks share switches and often go through host memory."""

NETWORK_SHARE = 0.8
"""Share of the network's bandwidth."""

LAUNCH_SECONDS = 12e-6
"""Time to start a collective: its kernel, and NCCL's assumption for the algorithm itself (8.4 us)."""

HOP_SECONDS = {"NVLink": 3.4e-6, "Infinity Fabric": 3.4e-6, "PCIe": 5.7e-6}
"""Latency between GPUs of one machine, for large messages (NCCL 2.19 to 2.28, `hwLatencies`, ring, protocol Simple)."""

NETWORK_HOP_SECONDS = 14e-6
"""Latency between two machines (ditto)."""

OVERLAP_SHARE = 0.9
"""Share of the computation that can hide communication: dependencies leave gaps at both ends."""

CONTENTION_SHARE = 1 - 1 / 1.189
"""Seconds of computation lost per second of hidden communication, as both use the device's processors and memory:
computation is 18.9% slower on average (Lee et al., 2025, arXiv:2507.03114, abstract)."""

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that DDP reduces at a time (torch's `bucket_cap_mb`); ZeRO's buckets are not smaller here."""

ZERO_GATHER_BYTES = 1e9
"""Bytes of updated weights that ZeRO-1 and -2 gather at a time: DeepSpeed's `allgather_bucket_size`, 5e8 elements."""

# Machines and their failures

GPUS_PER_NODE = 8
"""GPUs of the machines that clouds rent."""

USABLE_SHARE = 0.95
"""Share of the device's memory; the rest is lost to fragmentation in torch's allocator."""

FAILURE_GPU_HOURS = 50_000.0
"""GPU time between two failures: 419 in 54 days on 16,384 GPUs (Llama Team, 2024, "The Llama 3
herd of models", table 5) are one in 50,700 GPU-hours."""

DISK_BANDWIDTH = 1e9
"""Bytes per second at which a checkpoint is written."""

RESTART_SECONDS = 600.0
"""Time until a run that lost a machine trains again: a new machine, the weights, the checkpoint."""
