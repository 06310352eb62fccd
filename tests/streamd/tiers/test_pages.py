"""What smaps says of a mapping, and what the machine allows."""

import mmap
import re
from pathlib import Path

import pytest

from shared import shm
from streamd.tiers.pages import (
    HUGE_PAGE_BYTES,
    HugePageSettings,
    PageReport,
    huge_page_settings,
    page_report,
)

MIB = 1 << 20
SMAPS = """\
7f0000000000-7f0000100000 r--p 00000000 fe:00 42   /usr/lib/lib with spaces.so
KernelPageSize:        4 kB
Rss:                1024 kB
AnonHugePages:         0 kB
VmFlags: rd mr mw me
7f12a0000000-7f12c0000000 rw-s 00000000 00:01 1234   /memfd:streamd-slots (deleted)
KernelPageSize:     {page_kb:>4} kB
Rss:              {rss_kb:>6} kB
AnonHugePages:    {anonymous_kb:>6} kB
ShmemPmdMapped:   {shmem_kb:>6} kB
Shared_Hugetlb:   {hugetlb_kb:>6} kB
VmFlags: rd wr sh mr mw me ms
7f12c0000000-7f12e0000000 rw-p 00000000 00:00 0
KernelPageSize:        4 kB
Rss:                  64 kB
AnonHugePages:        64 kB
"""


@pytest.mark.parametrize(
    ("values", "kind", "resident_mib"),
    [
        ({"rss_kb": 2048}, "4 KiB", 2),
        ({"rss_kb": 0}, "4 KiB", 0),
        ({"rss_kb": 8192, "shmem_kb": 8192}, "transparent 2 MiB", 8),
        ({"rss_kb": 8192, "anonymous_kb": 4096}, "transparent 2 MiB", 8),
        ({"rss_kb": 8192, "shmem_kb": 2048}, "4 KiB", 8),
        ({"page_kb": 2048, "hugetlb_kb": 4096}, "hugetlb 2 MiB", 4),
    ],
)
@pytest.mark.parametrize("address", [0x7F12A0000000, 0x7F12BFFFFFFF])
def test_the_mapping_of_an_address_is_reported(tmp_path, values, kind, resident_mib, address):
    values = {"page_kb": 4, "rss_kb": 0, "anonymous_kb": 0, "shmem_kb": 0, "hugetlb_kb": 0} | values
    smaps = tmp_path / "smaps"
    smaps.write_text(SMAPS.format(**values))
    report = page_report(address, smaps)
    assert (report.kind, report.resident_bytes) == (kind, resident_mib * MIB)


def test_an_address_that_is_not_mapped_has_nothing(tmp_path):
    smaps = tmp_path / "smaps"
    smaps.write_text(SMAPS.format(page_kb=4, rss_kb=4, anonymous_kb=0, shmem_kb=0, hugetlb_kb=0))
    assert page_report(0x7F1300000000, smaps) == PageReport(4096, 0, 0)


def test_this_process_s_memory_is_found_in_its_smaps():
    with mmap.mmap(-1, 4 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory[:HUGE_PAGE_BYTES] = bytes(HUGE_PAGE_BYTES)
        report = page_report(shm.address(memory))
        assert report.kind == "4 KiB"
        # Neighbours with the same flags may be one mapping with it.
        assert report.resident_bytes >= HUGE_PAGE_BYTES


@pytest.mark.parametrize(
    ("settings", "possible"),
    [
        (HugePageSettings("never", "always", 0), False),
        (HugePageSettings("deny", "always", 0), False),
        (HugePageSettings("unknown", "unknown", 0), False),
        (HugePageSettings("advise", "never", 0), True),
        (HugePageSettings("always", "never", 0), True),
        (HugePageSettings("never", "never", 1), True),
    ],
)
def test_shared_memory_on_huge_pages_is_a_matter_of_two_settings(settings, possible):
    assert settings.shared_possible is possible


def test_the_machine_s_settings_are_read():
    settings = huge_page_settings()
    path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if path.exists():
        assert f"[{settings.shmem_enabled}]" in path.read_text()
    assert re.fullmatch("always|madvise|never|unknown", settings.thp_enabled)
    assert settings.hugetlb_pages >= 0
