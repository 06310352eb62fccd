"""One GPU: compiled functions by source and defines, launched on torch's current stream."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from infer.kernels.cuda.formats import grid_words
from infer.kernels.cuda.sources import LOWEST_ARCHITECTURE, compile_source
from shared.errors import ConfigError

Grid = tuple[int, int, int]


class Function:
    """A kernel and room for its arguments, which the driver copies at the launch."""

    def __init__(self, device: "Device", handle: Any, types: Sequence[type]) -> None:
        self._device = device
        self._handle = handle
        self._values = [kind() for kind in types]
        self._pointers = (ctypes.c_void_p * len(types))(*map(ctypes.addressof, self._values))
        self._pointers_at = ctypes.addressof(self._pointers)

    def __call__(self, grid: Grid, threads: int, *arguments: Any) -> None:
        """Arguments are pointers and numbers in order; a structure is copied. None is null."""
        if 0 in grid:
            return
        for index, argument in enumerate(arguments):
            value = self._values[index]
            if isinstance(argument, ctypes.Structure):
                self._pointers[index] = ctypes.addressof(argument)
            else:
                value.value = argument
        self._device.launch(self._handle, grid, threads, self._pointers_at)


class Device:
    """A CUDA device as the kernels use it. ConfigError where it is too old or without NVRTC."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        major, minor = torch.cuda.get_device_capability(self.device)
        self.architecture = 10 * major + minor
        if self.architecture < LOWEST_ARCHITECTURE:
            raise ConfigError(
                f"{torch.cuda.get_device_name(self.device)} has compute capability {major}.{minor}",
                "use a GPU of compute capability 7.5 (Turing, 2018) or more, or --device cpu",
            )
        try:
            from cuda.bindings import driver  # noqa: PLC0415 - absent on machines without CUDA
        except ImportError as error:
            raise ConfigError(
                f"CUDA's driver interface cannot be loaded ({error})", "install cuda-bindings"
            ) from error
        self._driver = driver
        # torch makes the context the kernels are loaded into.
        torch.empty(1, device=self.device)
        # torch.cuda.current_stream makes an object a call, which takes longer than a launch.
        self._stream_of = torch._C._cuda_getCurrentRawStream
        self._modules: dict[tuple[Any, ...], Any] = {}
        self._functions: dict[tuple[Any, ...], Function] = {}
        self._grids: dict[str, Tensor] = {}

    def function(
        self, source: str, name: str, types: Sequence[type], **defines: object
    ) -> Function:
        """Kernel `name` of `source` for these defines: compiled and loaded at its first use."""
        key = (source, name, *defines.items())
        if found := self._functions.get(key):
            return found
        with torch.cuda.device(self.device):
            module = self._module(source, defines)
            handle = self._check(self._driver.cuModuleGetFunction(module, name.encode()))
        return self._functions.setdefault(key, Function(self, handle, types))

    def _module(self, source: str, defines: dict[str, object]) -> Any:
        key = (source, *defines.items())
        if key not in self._modules:
            code = compile_source(source, defines, self.architecture)
            self._modules[key] = self._check(self._driver.cuModuleLoadData(code))
        return self._modules[key]

    def grid(self, name: str) -> int:
        """The device address of a format's lookup grid, 0 where it has none."""
        if name not in self._grids:
            words = grid_words(name)
            if words is None:
                return 0
            self._grids[name] = torch.from_numpy(words.view("int32")).to(self.device)
        return self._grids[name].data_ptr()

    def launch(self, handle: Any, grid: Grid, threads: int, arguments_at: int) -> None:
        stream = self._stream_of(self.device.index)
        self._check(
            self._driver.cuLaunchKernel(handle, *grid, threads, 1, 1, 0, stream, arguments_at, 0)
        )

    def _check(self, answer: tuple[Any, ...]) -> Any:
        status = answer[0]
        if int(status):
            text = self._driver.cuGetErrorString(status)[1]
            raise RuntimeError(f"CUDA: {text.decode() if text else status}")
        return answer[1] if len(answer) > 1 else None


def at(x: Tensor) -> int:
    """The address of a contiguous float32 tensor."""
    assert x.dtype is torch.float32
    assert x.is_contiguous()
    return x.data_ptr()
