"""What is written comes back; what is damaged does not."""

import struct

import msgpack
import pytest
import torch
import xxhash

from infer.caches.kv_cache import KvShape
from infer.caches.kv_file import Identity, KvFile, describe_planes, token_bytes, write
from infer.caches.latent_cache import LatentShape
from shared.errors import RequestError

CPU = torch.device("cpu")
CONTEXT = 64
IDS = tuple(range(100, 140))
TALK = {"messages": [{"role": "user", "content": "caf\u00e9 \ud800"}]}


def _gqa(exact=False):
    return KvShape(3, 2, 4).allocate(CONTEXT, exact, CPU).planes()


def _mla(exact=False):
    return LatentShape(3, 8, 4, 6, (0, 2)).allocate(CONTEXT, exact, CPU).planes()


def _mla_without_index(exact=False):
    return LatentShape(3, 8, 4, 6, ()).allocate(CONTEXT, exact, CPU).planes()


KINDS = [_gqa, _mla, _mla_without_index]


def _fill(planes):
    for seed, plane in enumerate(planes.values()):
        plane.copy_(torch.randn(plane.shape, generator=torch.Generator().manual_seed(seed)))
    return planes


def _identity(planes):
    return Identity([[1, 2, 3]], describe_planes(planes), ["cpu", False], "t")


@pytest.fixture
def small_blocks(monkeypatch):
    """Three positions a block, whatever the planes."""

    def set_for(planes):
        monkeypatch.setattr("infer.caches.kv_file._BLOCK_BYTES", 3 * token_bytes(planes))

    return set_for


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_any_beginning_comes_back(kind, exact, small_blocks, tmp_path):
    planes = _fill(kind(exact))
    small_blocks(planes)
    write(tmp_path / "a.kv", _identity(planes), IDS, TALK, planes)
    with KvFile(tmp_path / "a.kv") as file:
        assert file.head.identity == _identity(planes)
        assert (file.head.ids, file.head.talk) == (IDS, TALK)
        assert file.head.block_tokens == 3
        for count in (0, 1, 3, 4, len(IDS)):
            others = kind(exact)
            for plane in others.values():
                plane.fill_(7)
            file.restore(others, count)
            for name, plane in others.items():
                assert torch.equal(plane[:, :count], planes[name][:, :count])
                assert (plane[:, count:] == 7).all()


def test_a_device_type_numpy_does_not_know(tmp_path):
    """bfloat16, which a GPU's cache has."""
    planes = {"keys": torch.randn(2, CONTEXT, 3).bfloat16()}
    write(tmp_path / "a.kv", _identity(planes), IDS, {}, planes)
    others = {"keys": torch.zeros_like(planes["keys"])}
    with KvFile(tmp_path / "a.kv") as file:
        file.restore(others, len(IDS))
    assert torch.equal(others["keys"][:, : len(IDS)], planes["keys"][:, : len(IDS)])


def test_every_damaged_byte_is_noticed(small_blocks, tmp_path):
    planes = _fill({"keys": torch.empty(1, CONTEXT, 2)})
    small_blocks(planes)
    path = tmp_path / "a.kv"
    write(path, _identity(planes), IDS[:7], {}, planes)
    sound = path.read_bytes()
    for place in range(len(sound)):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        with pytest.raises(RequestError, match="damaged or foreign"), KvFile(path) as file:
            file.restore(planes, 7)
    for length in range(len(sound)):
        path.write_bytes(sound[:length])
        with pytest.raises(RequestError, match="damaged or foreign"), KvFile(path) as file:
            file.restore(planes, 7)


def test_blocks_that_change_places_are_noticed(small_blocks, tmp_path):
    planes = _fill({"keys": torch.empty(1, CONTEXT, 2)})
    small_blocks(planes)
    path = tmp_path / "a.kv"
    write(path, _identity(planes), IDS[:6], {}, planes)
    data = path.read_bytes()
    block_bytes = 3 * token_bytes(planes) + 8
    head, first, second = data[: -2 * block_bytes], data[-2 * block_bytes : -block_bytes], data
    path.write_bytes(head + second[-block_bytes:] + first)
    with KvFile(path) as file, pytest.raises(RequestError, match="block 0"):
        file.restore(planes, 6)


def _with_head(path, **changes):
    """Writes a file whose head is sound by its checksum and says something else."""
    planes = _fill(_gqa())
    write(path, _identity(planes), IDS, TALK, planes)
    data = path.read_bytes()
    head_bytes = int.from_bytes(data[12:16], "little")
    head = msgpack.unpackb(data[24 : 24 + head_bytes], unicode_errors="surrogatepass") | changes
    packed = msgpack.packb(head, unicode_errors="surrogatepass")
    fixed = struct.pack("<8sIIQ", data[:8], 1, len(packed), xxhash.xxh3_64_intdigest(packed))
    path.write_bytes(fixed + packed + data[24 + head_bytes :])
    return planes


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": b"abc"},
        {"ids": b""},
        {"ids": "text"},
        {"identity": [1]},
        {"identity": {"model": 1, "more": 2}},
        {"block_tokens": 0},
        {"block_tokens": float("inf")},
        {"block_tokens": float("nan")},
        {"block_tokens": "many"},
        {"talk": 7},
    ],
)
def test_a_head_that_makes_no_sense(changes, tmp_path):
    _with_head(tmp_path / "a.kv", **changes)
    with pytest.raises(RequestError, match="damaged or foreign"), KvFile(tmp_path / "a.kv"):
        pass


def test_a_head_cannot_ask_for_all_memory(tmp_path):
    planes = _with_head(
        tmp_path / "a.kv", ids=bytes(4 << 20), block_tokens=1 << 40, talk={"messages": []}
    )
    with (
        KvFile(tmp_path / "a.kv") as file,
        pytest.raises(RequestError, match="blocks are too large"),
    ):
        file.restore(planes, len(IDS))


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    planes = _fill(_gqa())

    def full(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "a.kv", _identity(planes), IDS, TALK, planes)
    assert list(tmp_path.iterdir()) == []


def test_only_the_owner_may_read_it(tmp_path):
    planes = _fill(_gqa())
    write(tmp_path / "a.kv", _identity(planes), IDS, TALK, planes)
    assert (tmp_path / "a.kv").stat().st_mode & 0o777 == 0o600
