import pytest
import torch

from infer.caches.kv_cache import KvCache
from shared.errors import RequestError

CPU = torch.device("cpu")


@pytest.mark.parametrize(("exact", "value_bytes"), [(False, 2), (True, 4)])
def test_bytes_a_token(exact, value_bytes):
    kv = KvCache(3, 8, 2, 16, exact, CPU)
    assert kv.token_bytes == 2 * 3 * 2 * 16 * value_bytes


def test_rows_go_where_they_belong():
    kv = KvCache(2, 8, 1, 4, True, CPU)
    rows = torch.arange(8.0).view(2, 1, 4)
    kv.store(1, 3, rows, -rows)
    assert torch.equal(kv.keys[1, 3:5], rows)
    assert torch.equal(kv.values[1, 3:5], -rows)


def test_a_full_context_is_refused_with_the_remedy():
    kv = KvCache(1, 8, 1, 4, True, CPU)
    kv.length = 6
    kv.make_room(2)
    with pytest.raises(RequestError, match="9 tokens do not fit a context of 8") as refusal:
        kv.make_room(3)
    assert "--ctx" in refusal.value.remedy


def test_an_impossible_size_is_refused_with_the_remedy():
    with pytest.raises(RequestError, match=" TB, which cannot be had") as refusal:
        KvCache(1 << 10, 1 << 30, 1 << 8, 1 << 8, True, CPU)
    assert "--ctx" in refusal.value.remedy
