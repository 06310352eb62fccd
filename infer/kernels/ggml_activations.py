"""Activations in the formats that ggml's dot products want them in."""

from infer.kernels.compiled_matmul import ConvertJob, convert
from infer.kernels.ggml_library import GgmlLibrary
from infer.kernels.jobs import prepared_job
from infer.kernels.scratch import Scratch
from infer.kernels.thread_team import ThreadTeam
from shared.quants import TensorType

_FORMATS = (
    TensorType.F16,
    TensorType.BF16,
    TensorType.Q8_0,
    TensorType.Q8_1,
    TensorType.Q8_K,
)
_LARGEST_BLOCK = 256
# What is converted in the time that another thread takes to join
_ITEM_VALUES = 1024


class Activations:
    """Room for one set of rows, up to `values` in all, in each format.

    Formats are named by ggml's type ids. F32 stands for the float rows as they are.
    """

    def __init__(
        self, library: GgmlLibrary, team: ThreadTeam, scratch: Scratch, values: int
    ) -> None:
        self._team = team
        self._job = prepared_job(ConvertJob, team.at)
        self._values = -(-values // _LARGEST_BLOCK) * _LARGEST_BLOCK
        self._formats = {int(kind): library.activation_format(kind) for kind in _FORMATS}
        self._addresses = {
            kind: scratch.reserve(form.row_bytes(self._values))
            for kind, form in self._formats.items()
        }

    @property
    def values(self) -> int:
        return self._values

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
        """Convert float32 [rows, width] at the address `source`; rows are whole blocks."""
        assert rows * width <= self._values
        form, job = self._formats[kind], self._job
        job.from_float, job.values = form.from_float, rows * width
        job.source, job.destination = source, self._addresses[kind]
        job.item_values, job.item_bytes = _ITEM_VALUES, form.row_bytes(_ITEM_VALUES)
        job.items = -(-job.values // _ITEM_VALUES)
        self._team.run(job, convert)
