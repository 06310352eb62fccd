import pytest
import torch

from infer.caches.kv_cache import KvShape
from infer.caches.latent_cache import LatentShape
from shared.errors import RequestError

CPU = torch.device("cpu")
# GLM-5.2's: 78 layers, of which 21 own an index
GLM = LatentShape(78, 512, 64, 128, (0, 1, *range(2, 78, 4)))


def test_bytes_a_token():
    assert 2 * GLM.token_values == 95_232
    assert GLM.allocate(4, False, CPU).token_bytes == 95_232
    assert GLM.allocate(4, True, CPU).token_bytes == 2 * 95_232


def test_the_shape_of_keys_and_values_says_what_they_take():
    shape = KvShape(3, 2, 16)
    assert 2 * shape.token_values == shape.allocate(8, False, CPU).token_bytes == 384


def test_layers_with_an_index_have_keys_of_their_own():
    kv = LatentShape(5, 8, 4, 6, (0, 3)).allocate(7, True, CPU)
    assert kv.latent.shape == (5, 7, 12)
    kv.index_keys(0).fill_(1)
    kv.index_keys(3).fill_(2)
    assert kv.index_keys(0).shape == (7, 6)
    assert (kv.index_keys(0) == 1).all()
    with pytest.raises(KeyError):
        kv.index_keys(1)


def test_an_impossible_size_is_refused_with_the_remedy():
    with pytest.raises(RequestError, match=" TB, which cannot be had") as refusal:
        GLM.allocate(1 << 40, True, CPU)
    assert "--ctx" in refusal.value.remedy
