"""Which kernels this machine gets."""

import logging

import torch

from infer.kernels.interface import Kernels
from infer.kernels.scratch import KernelBounds
from shared.errors import ConfigError

log = logging.getLogger(__name__)


def choose_kernels(bounds: KernelBounds, threads: int | None) -> Kernels:
    """ggml's in compiled loops; where they cannot be used, torch's own operations, with a word."""
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
