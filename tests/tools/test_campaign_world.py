"""The campaign's world: which tiers it serves, and what it says of a GPU."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from campaign import Campaign, await_vram
from campaign_client import gpu_bytes
from campaign_world import Broken, cache_limits, parse_device, used_vram_mib

CAMPAIGN = Path(__file__).resolve().parents[2] / "tools" / "campaign.py"


def nvidia_smi(directory, monkeypatch, script):
    """A program of that name which says what `script` echoes."""
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("text", "device"), [("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:3", "cuda:3")]
)
def test_devices(text, device):
    assert parse_device(text) == device


def test_each_tier_has_its_share_or_what_it_needs():
    mib = 1 << 20
    host = {"floor_bytes": 30 * mib + 5, "full_bytes": 40 * mib}
    gpu = {"floor_bytes": 10 * mib, "full_bytes": 60 * mib}
    assert cache_limits(host | {"gpu": None}, 0.5) == ["--host-cache", 32 * mib]
    assert cache_limits(host | {"gpu": gpu}, 0.5) == [
        *("--host-cache", 32 * mib, "--gpu-cache", 30 * mib),
    ]


def test_a_gpu_s_memory_is_what_the_driver_says(tmp_path, monkeypatch):
    nvidia_smi(tmp_path, monkeypatch, '[ "$1" = --id=3 ] && echo 1234')
    assert used_vram_mib("cuda:3") == 1234
    with pytest.raises(Broken, match="does not tell about cuda:0"):
        used_vram_mib("cuda:0")


def test_memory_of_a_gpu_that_does_not_come_back_is_a_leak(tmp_path, monkeypatch):
    monkeypatch.setattr("campaign.SETTLE_S", 0.0)
    nvidia_smi(tmp_path, monkeypatch, "echo 1064")
    assert await_vram("cuda:0", before_mib=1000) == 1064
    with pytest.raises(Broken, match="900 MiB were in use before, 1064 are now"):
        await_vram("cuda:0", before_mib=900)


@pytest.mark.parametrize(
    ("key", "now", "said"),
    [
        ("descriptors", 36, "descriptors: 35 before, 36 now"),
        ("descriptors", 34, ""),
        ("memory_mb", 54.0, ""),
        ("memory_mb", 54.1, "memory_mb: 30.0 before, 54.1 now"),
        ("vram_mib", 1064, ""),
        ("vram_mib", 1065, "vram_mib: 1000 before, 1065 now"),
    ],
)
def test_what_has_leaked_is_told(key, now, said):
    campaign = Campaign.__new__(Campaign)
    campaign._before = {"descriptors": 35, "memory_mb": 30.0, "vram_mib": 1000}
    assert "; ".join(campaign._changes(campaign._before | {key: now})) == said


def test_slabs_on_a_gpu_are_copied_by_the_driver():
    """With a driver whose device memory is this process's own."""

    def copy(target, source, size_bytes):
        ctypes.memmove(target, source, size_bytes)
        return ("fine",)

    driver = SimpleNamespace(CUresult=SimpleNamespace(CUDA_SUCCESS="fine"), cuMemcpyDtoH=copy)
    held = np.arange(200, dtype=np.uint8)
    assert gpu_bytes(driver)(held.ctypes.data + 7, 100) == held[7:107].tobytes()


def test_a_campaign_on_a_machine_without_a_gpu_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--device", "cuda", "--rounds", "1"],
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "nvidia-smi does not tell about cuda:0" in done.stderr
    assert "Traceback" not in done.stderr
