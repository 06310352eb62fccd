"""What our control group leaves, read from files made for it."""

import pytest

from shared.free_memory import available_memory_bytes, cgroup_room_bytes


def a_group(directory, limit, current=0, active=0, inactive=0):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{current}\n")
    (directory / "memory.stat").write_text(
        f"anon 5\nfile 99\nactive_file {active}\ninactive_file {inactive}\n"
    )


@pytest.fixture
def membership(tmp_path):
    path = tmp_path / "cgroup"
    path.write_text("1:name=systemd:/other\n0::/user.slice/app\n")
    return path


def test_the_narrowest_of_the_groups_above_us_decides(tmp_path, membership):
    root = tmp_path / "fs"
    a_group(root / "user.slice" / "app", "max", 10)
    assert cgroup_room_bytes(root, membership) is None
    a_group(root / "user.slice", 1000, 300)
    assert cgroup_room_bytes(root, membership) == 700
    a_group(root / "user.slice" / "app", 500, 100)
    assert cgroup_room_bytes(root, membership) == 400
    a_group(root, 350, 300)
    assert cgroup_room_bytes(root, membership) == 50
    a_group(tmp_path, 1, 1)
    assert cgroup_room_bytes(root, membership) == 50, "what is no group does not count"


def test_cached_pages_of_files_are_room(tmp_path, membership):
    root = tmp_path / "fs"
    a_group(root / "user.slice" / "app", 1000, 990, active=300, inactive=500)
    assert cgroup_room_bytes(root, membership) == 810
    a_group(root / "user.slice" / "app", 1000, 1100)
    assert cgroup_room_bytes(root, membership) == 0


def test_groups_of_version_one(tmp_path):
    root, path = tmp_path / "fs", tmp_path / "cgroup"
    path.write_text("11:cpu,cpuacct:/docker/a\n9:memory:/docker/a\n1:name=systemd:/docker/a\n")
    for group, limit in ((root / "memory" / "docker" / "a", 1000), (root / "memory", 2**63 - 4096)):
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (group / "memory.usage_in_bytes").write_text("900\n")
        (group / "memory.stat").write_text(
            "active_file 1\ninactive_file 1\ntotal_active_file 40\ntotal_inactive_file 20\n"
        )
    assert cgroup_room_bytes(root, path) == 160
    (root / "memory" / "docker" / "a" / "memory.limit_in_bytes").unlink()
    assert cgroup_room_bytes(root, path) is None, "the most it can say is no limit"
    (root / "memory" / "memory.limit_in_bytes").write_text("1200\n")
    assert cgroup_room_bytes(root, path) == 360, "in a container the tree's root is our group"


@pytest.mark.parametrize("text", [None, "", "nonsense\n"])
def test_without_a_group_there_is_no_limit(tmp_path, text):
    path = tmp_path / "cgroup"
    if text is not None:
        path.write_text(text)
    assert cgroup_room_bytes(tmp_path / "fs", path) is None


def test_files_that_make_no_sense_are_no_limit(tmp_path, membership):
    a_group(tmp_path / "fs" / "user.slice" / "app", "lots")
    assert cgroup_room_bytes(tmp_path / "fs", membership) is None
    (tmp_path / "fs" / "user.slice" / "app" / "memory.max").write_text("1000")
    (tmp_path / "fs" / "user.slice" / "app" / "memory.stat").write_text("anon 5\n")
    assert cgroup_room_bytes(tmp_path / "fs", membership) is None


def test_the_memory_of_this_machine():
    with open("/proc/meminfo") as meminfo:
        total_bytes = int(meminfo.readline().split()[1]) * 1024
    assert 0 < available_memory_bytes() < total_bytes
