"""The memory that the daemon shares, and what happens where there is none."""

import mmap
import os
import resource

import pytest

from shared import shm
from shared.errors import ConfigError
from streamd.tiers.pages import HUGE_PAGE_BYTES, huge_page_settings, page_report
from streamd.tiers.populate import populate
from streamd.tiers.regions import AreaRegion, Region, private_memory

MIB = 1 << 20


@pytest.fixture
def region():
    region = Region("test", 3 * MIB)
    yield region
    region.close()


def test_it_is_whole_huge_pages_and_says_which_it_has(region):
    assert region.size_bytes == len(region.memory) == 2 * HUGE_PAGE_BYTES
    assert region.page_kind == region.pages().kind
    if not huge_page_settings().shared_possible:
        assert region.page_kind == "4 KiB"


def test_a_small_one_is_as_large_as_was_asked_for():
    region = Region("test", 4096)
    assert region.size_bytes == len(region.memory) == 4096
    region.close()


def test_others_see_what_is_written_and_cannot_write(region):
    region.memory[5:10] = b"bytes"
    with shm.map_readonly(region.fd, region.size_bytes) as seen:
        assert seen[5:10] == b"bytes"
    with pytest.raises(ConfigError):
        shm.map_writable(region.fd, region.size_bytes)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 4096)


def test_a_client_s_area_is_writable_but_keeps_its_size():
    area = AreaRegion(8192)
    with shm.map_writable(area.fd, 8192) as mapped:
        mapped[0] = 7
    assert area.memory[0] == 7
    with pytest.raises(PermissionError):
        os.ftruncate(area.fd, 4096)
    area.close()


def test_private_memory_stands_on_huge_pages_where_the_machine_has_them():
    memory = private_memory(4 * HUGE_PAGE_BYTES)
    populate(memoryview(memory))
    kind = page_report(shm.address(memory)).kind
    if huge_page_settings().thp_enabled in ("always", "madvise"):
        assert kind == "transparent 2 MiB"
    else:
        assert kind == "4 KiB"


def _limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        size_bytes = int(statm.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + 16 * MIB, size_bytes + 16 * MIB))


def _limit_files() -> None:
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, lowest))


@pytest.mark.parametrize(
    "make", [lambda: Region("test", 64 * MIB), lambda: private_memory(64 * MIB)]
)
def test_memory_that_is_refused_is_a_clear_error(make, in_child):
    def refused():
        _limit_memory()
        make()

    said = in_child(refused)
    assert said.startswith("ConfigError: cannot ")
    assert f"{64 * MIB} bytes" in said
    assert "Cannot allocate memory" in said
    assert "ulimit -v" in said


@pytest.mark.parametrize("returnable", [False, True])
def test_a_region_that_cannot_be_shared_leaves_no_descriptor(monkeypatch, returnable):
    def refuse(fd):
        raise ConfigError("cannot open shared memory for reading", "mount /proc")

    monkeypatch.setattr(shm, "open_readonly" if returnable else "seal_readonly", refuse)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="for reading"):
        Region("test", MIB, returnable)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_descriptors_that_are_refused_are_a_clear_error(in_child):
    def refused():
        _limit_files()
        Region("test", MIB)

    said = in_child(refused)
    assert said.startswith("ConfigError: cannot make")
    assert "Too many open files" in said
    assert "ulimit -n" in said
