"""Activations in the formats that ggml's dot products want them in."""

from infer.kernels.compiled_matmul import ConvertJob, convert
from infer.kernels.ggml_library import GgmlLibrary
from infer.kernels.jobs import prepared_job
from infer.kernels.scratch import Scratch
from infer.kernels.thread_team import ThreadTeam, run
from shared.quants import TensorType

_FORMATS = (
    TensorType.F16,
    TensorType.BF16,
    TensorType.Q8_0,
    TensorType.Q8_1,
    TensorType.Q8_K,
)
_LARGEST_BLOCK = 256


class Activations:
    """Room for one set of rows, up to `values` in all, in each format.

    Formats are named by ggml's type ids. F32 stands for the float rows as they are.
    """

    def __init__(
        self, library: GgmlLibrary, team: ThreadTeam, scratch: Scratch, values: int
    ) -> None:
        self._job = prepared_job(ConvertJob, team.at)
        self._values = -(-values // _LARGEST_BLOCK) * _LARGEST_BLOCK
        self._formats = {int(kind): library.activation_format(kind) for kind in _FORMATS}
        self._addresses = {
            kind: scratch.reserve(form.row_bytes(self._values))
            for kind, form in self._formats.items()
        }

    def address(self, kind: int) -> int:
        """Where converted rows begin; 0 for F32."""
        return self._addresses.get(kind, 0)

    def stride(self, kind: int, width: int) -> int:
        """Bytes from one row of `width` activations to the next."""
        return width * 4 if kind == TensorType.F32 else self._formats[kind].row_bytes(width)

    def from_float(self, kind: int) -> int:
        """The address of the conversion; 0 for F32."""
        return 0 if kind == TensorType.F32 else self._formats[kind].from_float

    def convert(self, kind: int, source: int, rows: int, width: int) -> None:
        """Convert float32 [rows, width] at the address `source`."""
        assert rows * width <= self._values
        job = self._job
        job.convert = self._formats[kind].from_float
        job.width = width
        job.source, job.source_stride = source, width * 4
        job.destination, job.destination_stride = self._addresses[kind], self.stride(kind, width)
        job.items = rows
        run(job.at, convert)
