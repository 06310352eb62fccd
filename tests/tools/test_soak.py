"""What the soak calls flat, and a soak of seconds."""

import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from soak import TENTHS, judge, memory_mib, table
from soak_client import Latencies

SOAK = Path(__file__).resolve().parents[2] / "tools" / "soak.py"


def tenths_of(**series):
    """Ten of them; each series is ten values, or one for all."""
    columns = {
        name.replace("_", " "): values if isinstance(values, list) else [values] * TENTHS
        for name, values in series.items()
    }
    return [{name: values[at] for name, values in columns.items()} for at in range(TENTHS)]


def test_what_stays_as_it_is_is_flat():
    assert judge(tenths_of(daemon_RSS=60.0, chat_PSS=200.0, read_fds=16, chat_p50=9.0)) == []


@pytest.mark.parametrize("kind", ["RSS", "PSS"])
@pytest.mark.parametrize(("last", "is_flat"), [(104.0, True), (104.1, False), (50.0, True)])
def test_memory_may_grow_by_so_much(kind, last, is_flat):
    """From the second tenth on: 2 MiB and 2%."""
    tenths = tenths_of(**{f"daemon_{kind}": [70.0, 100.0, *[100.0] * 7, last]})
    assert judge(tenths) == ([] if is_flat else [f"daemon {kind} was 100 and is 104"])


@pytest.mark.parametrize(("last", "is_flat"), [(35, True), (36, False), (30, True)])
def test_descriptors_may_not_grow(last, is_flat):
    tenths = tenths_of(daemon_fds=[33, 35, *[35] * 7, last])
    assert judge(tenths) == ([] if is_flat else ["daemon fds was 35 and is 36"])


@pytest.mark.parametrize(("kind", "most"), [("p50", 1.5), ("p99", 2.0)])
def test_latency_is_judged_by_the_best_of_the_last_tenths(kind, most):
    first, middle = [9.0, 2.0, 1.0, 3.0], [50.0] * 3
    slow = most + 0.01
    assert judge(tenths_of(**{f"chat_{kind}": [*first, *middle, 40.0, most, 40.0]})) == []
    assert judge(tenths_of(**{f"chat_{kind}": [*first, *middle, slow, slow, slow]})) == [
        f"chat {kind} was 1 and is {slow:.3g}"
    ]


def test_rates_are_told_and_not_judged():
    assert (
        judge(tenths_of(**{"chat_/s": [100.0] * 9 + [1.0], "disk_MB/s": [5.0] * 9 + [0.1]})) == []
    )


def test_a_slow_leak_and_a_slow_decay_are_seen():
    """In half an hour: 200 KiB a minute; a request that takes a tenth longer each tenth."""
    leak = [60 + 0.2 * 3 * at for at in range(TENTHS)]
    decay = [1.1**at for at in range(TENTHS)]
    assert [
        words.split(" was")[0] for words in judge(tenths_of(read_RSS=leak, read_p50=decay))
    ] == [
        "read RSS",
        "read p50",
    ]


def test_the_table_is_markdown():
    lines = list(table(tenths_of(daemon_RSS=60.123456, chat_p50=9.0)))
    assert lines[:3] == ["| tenth | daemon RSS | chat p50 |", "|---|---|---|", "| 1 | 60.12 | 9 |"]
    assert len(lines) == 2 + TENTHS


def test_quantiles_are_those_of_what_was_added():
    latencies = Latencies()
    rng = np.random.default_rng(0)
    took_s = rng.lognormal(-6.0, 1.0, 10_000)
    for one_s in took_s.tolist():
        latencies.add(one_s)
    values = latencies.take()
    assert values["requests"] == 10_000
    for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
        assert values[name] == pytest.approx(1000 * np.quantile(took_s, share), rel=0.03)
    assert latencies.take()["requests"] == 0


def test_any_duration_is_counted():
    latencies = Latencies()
    for took_s in (0.0, 1e-9, 1e-6, 5.0, 1e9):
        latencies.add(took_s)
    assert latencies.take()["requests"] == 5


def test_memory_of_a_process():
    """MiB; pages of one's own count in both, those shared with others in part in the second."""
    before_rss, before_pss = memory_mib(os.getpid())
    with mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as ours:
        ours.write(bytes(8 << 20))
        rss, pss = memory_mib(os.getpid())
    assert before_rss + 7 < rss < before_rss + 40
    assert before_pss + 7 < pss < rss


@pytest.mark.slow
def test_a_soak_of_seconds():
    """Judged or not: seconds are too short for that, on a machine that does other things too."""
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(SOAK), "--minutes", "0.1", "--json"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    took_s = time.monotonic() - started_s
    tenths = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(tenths) == TENTHS, done.stderr
    assert took_s > 6.0
    last = tenths[-1]
    assert min(last["chat /s"], last["read /s"], last["disk MB/s"]) > 0
    assert 0 < last["read p50"] <= last["read p99"]
    assert last["daemon fds"] == tenths[1]["daemon fds"]
    assert done.returncode == bool(judge(tenths))
    assert all(line.startswith("soak: ") for line in done.stderr.splitlines())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "/no/such.gguf"), "soak: cannot open /no/such.gguf"),
        (("--device", "auto"), "say which: cpu or cuda"),
    ],
)
def test_what_cannot_begin_ends_with_a_sentence(words, said):
    done = subprocess.run(
        [sys.executable, str(SOAK), *words],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode != 0
    assert said in done.stderr.splitlines()[-1]
