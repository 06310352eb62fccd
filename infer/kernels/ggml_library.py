"""ggml's CPU functions, from the libggml-python package, as addresses for compiled code to call.

    vec_dot    void (int n, float *s, size_t, const void *x, size_t, const void *y, size_t, int)
    from_float void (const float *x, void *y, int64_t n)
    to_float   void (const void *x, float *y, int64_t n)

vec_dot multiplies a row x of weights with activations y that are in the type's own activation
format; from_float makes those. All work on whole blocks and touch nothing but their arguments.
"""

import ctypes
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llvmlite.binding
import numpy as np

from infer.kernels.compiled_grids import TO_FLOAT
from shared.errors import ConfigError, UnsupportedModel
from shared.quants import GEOMETRY, TensorType, row_bytes

# The trait structs are not versioned: another minor version may lay them out differently.
SUPPORTED_VERSION = "0.20."
_CHECK_COLUMNS = 256
_CHECK_TOLERANCE = 0.02
# ggml's name of an instruction set and LLVM's name of the host feature
_INSTRUCTION_SETS = {
    "avx": "avx",
    "avx2": "avx2",
    "bmi2": "bmi2",
    "f16c": "f16c",
    "fma": "fma",
    "avx_vnni": "avxvnni",
    "avx512": "avx512f",
    "avx512_vbmi": "avx512vbmi",
    "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16",
    "amx_int8": "amx-int8",
    "neon": "neon",
    "dotprod": "dotprod",
    "matmul_int8": "i8mm",
    "sve": "sve",
}


class _Traits(ctypes.Structure):
    """struct ggml_type_traits of ggml.h"""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block_weights", ctypes.c_int64),
        ("block_interleave", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_reference", ctypes.c_void_p),
    )


class _CpuTraits(ctypes.Structure):
    """struct ggml_type_traits_cpu of ggml-cpu.h"""

    _fields_ = (
        ("from_float", ctypes.c_void_p),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("rows_at_once", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class TypeFunctions:
    """Addresses for one weight type; 0 where nothing needs to be called (F32 is float already)."""

    vec_dot: int
    vec_dot_type: int
    to_float: int


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """Blocks as ggml has them in memory: its Q8_1 is smaller than the file format's."""

    from_float: int
    block_weights: int
    block_bytes: int

    def row_bytes(self, columns: int) -> int:
        blocks, rest = divmod(columns, self.block_weights)
        assert rest == 0
        return blocks * self.block_bytes


class GgmlLibrary:
    """`version` is ggml's own, such as "0.20.2"."""

    def __init__(self, directory: Path, host_features: Mapping[str, bool]) -> None:
        """Load from the package's folder; ConfigError where it cannot be used on this machine."""
        try:
            self._base = ctypes.CDLL(str(_shared_object(directory, "ggml-base")))
            self._cpu = ctypes.CDLL(str(_shared_object(directory, "ggml-cpu")))
            self._base.ggml_version.restype = ctypes.c_char_p
            self.version = self._base.ggml_version().decode()
        except (OSError, AttributeError) as error:
            raise _unusable(f"the ggml library cannot be loaded: {error}") from error
        if not self.version.startswith(SUPPORTED_VERSION):
            raise _unusable(f"ggml {self.version} is not {SUPPORTED_VERSION}x")
        self._require_instructions(host_features)
        self._base.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
        self._cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_CpuTraits)
        # Fills the tables that the functions look f16 and the codebooks up in.
        self._cpu.ggml_cpu_init()
        self._check_geometry()
        self._check_dot()

    @property
    def base(self) -> ctypes.CDLL:
        """The library of the formats themselves, with the functions that make them."""
        return self._base

    def functions(self, type_id: int) -> TypeFunctions:
        """UnsupportedModel where ggml cannot multiply by this type on a CPU."""
        if type_id in GEOMETRY:
            base = self._base.ggml_get_type_traits(type_id).contents
            cpu = self._cpu.ggml_get_type_traits_cpu(type_id).contents
            to_float = self._to_float(type_id, base.to_float or 0)
            if cpu.vec_dot and (to_float or type_id == TensorType.F32):
                return TypeFunctions(cpu.vec_dot, cpu.vec_dot_type, to_float)
        name = GEOMETRY[type_id].name if type_id in GEOMETRY else f"type {type_id}"
        raise UnsupportedModel(
            f"weights of {name} cannot be multiplied on the CPU",
            "use a file of another quantisation",
        )

    def activation_format(self, activation_type: int) -> ActivationFormat:
        """The format behind a `vec_dot_type`."""
        base = self._base.ggml_get_type_traits(activation_type).contents
        cpu = self._cpu.ggml_get_type_traits_cpu(activation_type).contents
        assert cpu.from_float
        return ActivationFormat(cpu.from_float, base.block_weights, base.block_bytes)

    def _to_float(self, type_id: int, generic: int) -> int:
        """The table's entries for F16 and for grids go value by value. The CPU library has a vector
        function for F16, we for the others."""
        if type_id == TensorType.F16:
            return ctypes.cast(self._cpu.ggml_cpu_fp16_to_fp32, ctypes.c_void_p).value or generic
        return TO_FLOAT.get(type_id, generic)

    def _require_instructions(self, host: Mapping[str, bool]) -> None:
        for name, feature in _INSTRUCTION_SETS.items():
            if getattr(self._cpu, f"ggml_cpu_has_{name}")() and not host.get(feature, False):
                raise _unusable(f"ggml was built for {name}, which this processor lacks")

    def _check_geometry(self) -> None:
        for type_id in (TensorType.IQ2_XXS, TensorType.Q4_K, TensorType.Q8_0):
            traits = self._base.ggml_get_type_traits(type_id).contents
            _, _, weights, size = GEOMETRY[type_id]
            if (traits.block_weights, traits.block_bytes) != (weights, size):
                raise _unusable(f"ggml's {type_id.name} blocks are not the file format's")

    def _check_dot(self) -> None:
        """Multiply one row of known bytes in each of two types as the kernels will."""
        # Imported here as only this check needs it: it takes 0.1 s.
        from infer.kernels import reference  # noqa: PLC0415
        from infer.kernels.quant_matrix import QuantMatrix  # noqa: PLC0415

        x = np.cos(np.arange(_CHECK_COLUMNS, dtype=np.float32))
        for type_id in (TensorType.IQ2_XXS, TensorType.Q8_0):
            data = np.arange(row_bytes(type_id, _CHECK_COLUMNS), dtype=np.uint8)
            scales = data.reshape(-1, GEOMETRY[type_id].block_bytes)[:, :2]
            scales[:] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
            matrix = QuantMatrix.over(type_id, _CHECK_COLUMNS, data)
            weights = reference.dequantize(matrix).numpy()[0]
            expected = float(weights.astype(np.float64) @ x)
            size = float(np.linalg.norm(weights) * np.linalg.norm(x))
            if not abs(self._dot(type_id, data, x) - expected) <= _CHECK_TOLERANCE * size:
                raise _unusable(f"ggml's dot product of {type_id.name} is wrong")

    def _dot(self, type_id: int, row: np.ndarray, x: np.ndarray) -> float:
        functions = self.functions(type_id)
        form = self.activation_format(functions.vec_dot_type)
        activations = (ctypes.c_uint8 * form.row_bytes(len(x)))()
        pointer, whole = ctypes.c_void_p, ctypes.c_int64
        convert = ctypes.CFUNCTYPE(None, pointer, pointer, whole)(form.from_float)
        convert(x.ctypes.data, activations, len(x))
        result = ctypes.c_float()
        dot = ctypes.CFUNCTYPE(
            None, ctypes.c_int, pointer, whole, pointer, whole, pointer, whole, ctypes.c_int
        )(functions.vec_dot)
        dot(len(x), ctypes.byref(result), 0, row.ctypes.data, 0, activations, 0, 1)
        return result.value


def host_features() -> Mapping[str, bool]:
    """LLVM's names of what this processor can do."""
    return llvmlite.binding.get_host_cpu_features()


@cache
def load() -> GgmlLibrary:
    """The installed library, checked; ConfigError where there is none that works here."""
    spec = importlib.util.find_spec("libggml")
    if spec is None or spec.origin is None:
        raise _unusable("the package libggml-python is not installed")
    return GgmlLibrary(Path(spec.origin).parent, host_features())


def _shared_object(directory: Path, name: str) -> Path:
    for folder in ("lib64", "lib"):
        for suffix in (".so", ".dylib"):
            candidate = directory / folder / f"lib{name}{suffix}"
            if candidate.exists():
                return candidate
    raise FileNotFoundError(f"lib{name} is not in {directory}")


def _unusable(message: str) -> ConfigError:
    return ConfigError(message, "install libggml-python 0.20 for this machine, or run without it")
