"""What the driver's tool says of a GPU's memory, and what it does not say."""

import os
import time

import pytest
from device_memory import DeviceMemory


def test_without_a_gpu_there_is_no_memory_to_watch():
    with DeviceMemory(None) as memory:
        pass
    assert memory.peak_bytes is None


@pytest.fixture
def driver_tool(tmp_path, monkeypatch):
    """driver_tool(script): what nvidia-smi is; `watching` is 1 where it is asked again and again,
    and a file `done` in the folder says that it has told what it has."""

    def make(script):
        tool = tmp_path / "nvidia-smi"
        head = f"#!/bin/sh\ncd {tmp_path}\ncase $* in *-lms*) watching=1;; esac\n"
        tool.write_text(head + script)
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path / "done"

    return make


def test_a_peak_late_in_a_long_run_is_seen(driver_tool):
    many = "yes 100 | head -n 40000; echo 5000; : > done; exec sleep 60"
    done = driver_tool(f'[ "$watching" ] || {{ echo 100; exit; }}\n{many}\n')
    with DeviceMemory(0) as memory:
        end_s = time.monotonic() + 20
        while not done.exists() and time.monotonic() < end_s:
            time.sleep(0.01)
    assert memory.peak_bytes == 4900 << 20


@pytest.mark.parametrize("script", ["echo '[N/A]'", "echo no device >&2; exit 6"])
def test_a_driver_that_says_nothing_is_not_watched(driver_tool, script):
    driver_tool(script)
    with DeviceMemory(0) as memory:
        pass
    assert memory.peak_bytes is None
