"""What pages a mapping has got; the system's answer to madvise tells nothing."""

from dataclasses import dataclass
from pathlib import Path

HUGE_PAGE_BYTES = 2 << 20

_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_THP_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OVERCOMMIT = Path("/proc/sys/vm/nr_overcommit_hugepages")
_RESERVED = Path("/proc/sys/vm/nr_hugepages")


@dataclass(frozen=True)
class PageReport:
    """Of one mapping: how much of what is in memory stands on huge pages."""

    kernel_page_bytes: int
    resident_bytes: int
    huge_bytes: int

    @property
    def kind(self) -> str:
        if self.kernel_page_bytes >= HUGE_PAGE_BYTES:
            return "hugetlb 2 MiB"
        if self.huge_bytes and 2 * self.huge_bytes >= self.resident_bytes:
            return "transparent 2 MiB"
        return f"{self.kernel_page_bytes >> 10} KiB"


def page_report(address: int, smaps: Path = Path("/proc/self/smaps")) -> PageReport:
    """Of the mapping that contains `address`, read from smaps.

    7f12a0000000-7f12c0000000 rw-s 00000000 00:01 1234   /memfd:streamd-slots (deleted)
    KernelPageSize:        4 kB
    Rss:             2097152 kB
    ShmemPmdMapped:        0 kB
    """
    fields: dict[str, int] = {}
    inside = False
    with smaps.open() as lines:
        for line in lines:
            head, *rest = line.split()
            if not head.endswith(":"):
                if inside:
                    break
                begin, end = (int(word, 16) for word in head.split("-"))
                inside = begin <= address < end
            elif inside and len(rest) == 2:
                fields[head[:-1]] = int(rest[0]) << 10
    huge = ("ShmemPmdMapped", "AnonHugePages", "Shared_Hugetlb", "Private_Hugetlb")
    huge_bytes = sum(fields.get(name, 0) for name in huge)
    hugetlb_bytes = fields.get("Shared_Hugetlb", 0) + fields.get("Private_Hugetlb", 0)
    return PageReport(
        fields.get("KernelPageSize", 4096), fields.get("Rss", 0) + hugetlb_bytes, huge_bytes
    )


@dataclass(frozen=True)
class HugePageSettings:
    """What the machine allows for memory that is shared by descriptor."""

    shmem_enabled: str
    thp_enabled: str
    hugetlb_pages: int  # reserved or allowed beyond the reserve

    @property
    def shared_possible(self) -> bool:
        return self.hugetlb_pages > 0 or self.shmem_enabled in ("advise", "within_size", "always")


def huge_page_settings() -> HugePageSettings:
    return HugePageSettings(
        _chosen(_SHMEM_ENABLED),
        _chosen(_THP_ENABLED),
        _number(_OVERCOMMIT) + _number(_RESERVED),
    )


def _chosen(path: Path) -> str:
    """'never' of 'always within_size advise [never] deny force'."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return "unknown"


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
