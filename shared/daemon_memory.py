"""Host memory that the daemon's process takes besides slots and resident tensors.

Measured as the peak of its resident memory (VmHWM) less its slots and tensors: 43 MiB with a small
model on a CPU; 72 MiB with 15,168 experts and a slot for each of them, whose tables take about
2 KiB an expert; 115 MiB with a GPU tier and 16 layers of 192 experts, where the driver has its
part. What is planned is a little more.
"""

CPU_PROCESS_BYTES = 64 << 20
GPU_PROCESS_BYTES = 128 << 20
EXPERT_BYTES = 2560


def process_bytes(with_gpu: bool, expert_count: int) -> int:
    """What is planned for it; with_gpu: whether there is a GPU tier."""
    fixed_bytes = GPU_PROCESS_BYTES if with_gpu else CPU_PROCESS_BYTES
    return fixed_bytes + expert_count * EXPERT_BYTES
