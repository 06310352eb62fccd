"""`streamd bench-io`, `doctor` and `scrub`: what they print, keep and end with."""

import json

import pytest
import xxhash

from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from streamd.commands import io_commands
from streamd.commands.doctor import FAIL, OK, WARN, Finding
from streamd.commands.io_best import load_best, reads_of
from streamd.commands.scrub import FileReport

SECONDS = 0.001


@pytest.fixture(autouse=True)
def cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_bench_io_for_programs_has_rows_and_the_best_which_is_kept(demo_model, capsys):
    assert io_commands.bench_io(demo_model, as_json=True, row_seconds=SECONDS) == 0
    values = json.loads(capsys.readouterr().out)
    assert values.keys() == {"rows", "best"}
    assert all(
        row.keys()
        >= {"engine", "pattern", "depth", "pages", "mb_s", "cpu_ms_per_gb"}
        | {"latency_ms_p50", "latency_ms_p99"}
        for row in values["rows"]
    )
    best = values["best"]
    assert best["engine"] in {row["engine"] for row in values["rows"]}
    experts = ExpertIndex.from_gguf(GgufIndex.open(demo_model))
    kept = load_best(reads_of(demo_model, experts), 1024)
    assert kept is not None
    assert (kept.engine, kept.depth, kept.mb_s) == (best["engine"], best["depth"], best["mb_s"])


def test_bench_io_for_people_is_a_table_and_needs_no_place_to_keep_it(
    demo_model, capsys, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert io_commands.bench_io(demo_model, as_json=False, row_seconds=SECONDS) == 0
    said = capsys.readouterr()
    head, *rows, best = said.out.splitlines()
    estimate = f"about {SECONDS * len(rows):.1f}s"
    assert said.err == f"{len(rows)} measurements of 0.001 s, {estimate}\n"
    assert head.split()[:4] == ["engine", "pattern", "depth", "pages"]
    assert len(rows) >= 20
    assert all("shared" in row or "private" in row for row in rows)
    assert best.startswith("best: ")


def test_scrub_sums_every_file(demo_model, capsys):
    content = demo_model.read_bytes()
    assert io_commands.scrub(demo_model, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {
        "path": str(demo_model),
        "size_bytes": len(content),
        "xxh3": xxhash.xxh3_64_hexdigest(content),
        "error_count": 0,
        "errors": [],
    }
    assert io_commands.scrub(demo_model, as_json=False) == 0
    assert capsys.readouterr().out.split() == [
        *f"{demo_model}: {len(content):,} bytes, xxh3".split(),
        xxhash.xxh3_64_hexdigest(content),
    ]


def test_scrub_of_an_unreadable_file_says_where_and_fails(demo_model, capsys, monkeypatch):
    report = FileReport(demo_model, 100)
    report.add_error(0, 50, io_commands_error("it is broken"))
    monkeypatch.setattr(io_commands, "read_whole", lambda *_: iter([report]))
    assert io_commands.scrub(demo_model, as_json=False) == 1
    said = capsys.readouterr().out
    assert "1 unreadable parts" in said
    assert "bytes 0 to 50: it is broken" in said


def io_commands_error(message: str):
    from shared.errors import ReadFailed  # noqa: PLC0415

    return ReadFailed(message)


@pytest.mark.parametrize(("levels", "code"), [((OK, WARN), 0), ((OK, FAIL, WARN), 1), ((), 0)])
def test_doctor_fails_only_if_a_finding_is_a_failure(levels, code, capsys, monkeypatch):
    findings = [Finding(level, "subject", "found", "remedy") for level in levels]
    monkeypatch.setattr(io_commands, "examine", lambda *_: iter(findings))
    assert io_commands.doctor(None) == code
    assert len(capsys.readouterr().out.splitlines()) == 2 * len(levels)


def test_doctor_measures_the_drive_of_the_model(demo_model, capsys, monkeypatch):
    monkeypatch.setattr(io_commands, "DISK_PROBE_SECONDS", SECONDS)
    code = io_commands.doctor(demo_model)
    lines = capsys.readouterr().out.splitlines()
    subjects = [line[6:20].strip() for line in lines if not line.startswith(" ")]
    assert code == any(line.startswith(FAIL) for line in lines)
    architecture = GgufIndex.open(demo_model).architecture
    assert any(line.startswith(OK) and architecture in line for line in lines)
    assert subjects[-1] == "disk"
    assert lines[-1].split()[2].replace(",", "").isdigit()
