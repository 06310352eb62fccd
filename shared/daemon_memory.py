"""Host memory that the daemon's process takes besides slots and resident tensors.

Measured as the peak of its resident memory (VmHWM) less its slots and tensors: 43 MiB with a small
model on a CPU; 72 MiB with 15,168 experts and a slot for each of them, whose tables take about
2 KiB an expert; 115 MiB with a GPU tier and 16 layers of 192 experts,
where the driver has its part.
"""

CPU_PROCESS_BYTES = 96 << 20
GPU_PROCESS_BYTES = 128 << 20


def process_bytes(with_gpu: bool) -> int:
    """What is planned for it; with_gpu: whether there is a GPU tier."""
    return GPU_PROCESS_BYTES if with_gpu else CPU_PROCESS_BYTES
