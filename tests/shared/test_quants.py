import gguf
import pytest

from shared.errors import MalformedModel, UnsupportedModel
from shared.quants import GEOMETRY, TensorType, geometry, row_bytes


def test_table_is_that_of_the_gguf_package():
    expected = {
        int(kind): (int(kind), kind.name, *gguf.GGML_QUANT_SIZES[kind])
        for kind in gguf.GGMLQuantizationType
    }
    assert expected == {type_id: tuple(block) for type_id, block in GEOMETRY.items()}


@pytest.mark.parametrize("type_id", [-1, 4, 31, 38, 42, 1 << 31])
def test_unknown_type_is_refused(type_id):
    with pytest.raises(UnsupportedModel, match=f"tensor type {type_id} is unknown") as caught:
        geometry(type_id)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("type_id", "columns", "expected"),
    [
        (TensorType.F32, 7, 28),
        (TensorType.Q8_0, 64, 68),
        (TensorType.IQ2_XXS, 4096, 1056),
        (TensorType.NVFP4, 64, 36),
    ],
)
def test_row_bytes(type_id, columns, expected):
    assert row_bytes(type_id, columns) == expected


@pytest.mark.parametrize(("type_id", "columns"), [(TensorType.Q8_0, 33), (TensorType.Q4_K, 128)])
def test_row_of_broken_blocks_is_refused(type_id, columns):
    with pytest.raises(MalformedModel, match=f"row of {columns} weights"):
        row_bytes(type_id, columns)
