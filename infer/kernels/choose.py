"""Which kernels this machine gets."""

import logging

import torch

from infer.kernels.interface import Kernels
from infer.kernels.scratch import KernelBounds
from shared.errors import ConfigError

log = logging.getLogger(__name__)


def choose_kernels(bounds: KernelBounds, threads: int | None, device: torch.device) -> Kernels:
    """On a GPU our own; on the CPU ggml's in compiled loops, or, with a word, torch's operations.

    ConfigError where the GPU is too old.
    """
    if device.type == "cuda":
        from infer.kernels.cuda.kernels import CudaKernels  # noqa: PLC0415 - needs cuda-bindings

        return CudaKernels(bounds, device)
    try:
        from infer.kernels.ggml_cpu import GgmlKernels  # noqa: PLC0415 - compiles or loads loops

        kernels = GgmlKernels(bounds, threads)
    except (ConfigError, ImportError) as error:
        from infer.kernels.reference_kernels import ReferenceKernels  # noqa: PLC0415

        log.warning("slow, but right: computing with torch alone, because %s", error)
        return ReferenceKernels()
    # What is left to torch is small; a second team of threads would be in the first one's way.
    torch.set_num_threads(1)
    return kernels
