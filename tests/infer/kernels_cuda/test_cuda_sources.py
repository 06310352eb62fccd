"""What NVRTC writes into must belong to nobody else."""

from infer.kernels.cuda.sources import _room


def test_rooms_are_never_shared():
    for size_bytes in (0, 1, 2, 100):
        room, other = _room(size_bytes), _room(size_bytes)
        assert len(room) > max(1, size_bytes)
        assert room is not other
