"""Builds, checks and times everything CUDA on a machine that has a GPU; one report.

    python tools/check_cuda.py --oracle DIR [--synthetic-layers 16] [--out report.json]

Stages: tests marked gpu; the daemon's GPU tier between processes; kernels by type (bench_cuda.py);
whole models through daemon and client; tokens and prompts as on a consumer's machine; the fault
campaign. DIR holds hy3-*.gguf with hy3.npz and hy3-quant-logits.npz, and perhaps the same of glm.
A stage that fails is reported, and the others still run; the exit code tells.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from device_memory import DeviceMemory
from gguf_mtp import agreeing_model

PROJECT = Path(__file__).resolve().parents[1]
DEMO = PROJECT / "models" / "demo-hy3-iq2mix.gguf"
QUESTION = "Which is the largest planet in the solar system?"
EXACT_TOLERANCE = 1e-3
VRAM, VRAM_MIB = "8G", 8192


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--oracle", type=Path)
    parser.add_argument("--synthetic-layers", type=int, default=16)
    parser.add_argument(
        "--stages",
        default="tests,tier,kernels,oracles,mtp,demo,synthetic,vram,consumer,prompts,campaign",
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.oracle is None and {"oracles", "mtp"} & set(arguments.stages.split(",")):
        parser.error("give --oracle DIR, or --stages without oracles and mtp")
    stages: dict[str, Callable[[], Any]] = {
        "tests": lambda: _python("-m", "pytest", "-m", "gpu", "-q", "-x"),
        "tier": lambda: _python("tools/check_gpu_tier.py"),
        "kernels": lambda: _python("tools/bench_cuda.py"),
        "oracles": lambda: check_oracles(arguments.oracle),
        "mtp": lambda: check_mtp(arguments.oracle),
        "demo": check_demo,
        "synthetic": lambda: bench_synthetic(arguments.synthetic_layers),
        "vram": lambda: check_vram(arguments.synthetic_layers),
        "consumer": lambda: bench_consumer(arguments.synthetic_layers),
        "prompts": lambda: bench_prompts(arguments.synthetic_layers),
        "campaign": lambda: _python("tools/campaign.py", "--device", "cuda", "--minutes", "2"),
    }
    report: dict[str, Any] = {}
    for name in arguments.stages.split(","):
        print(f"== {name}", flush=True)
        started_s = time.monotonic()
        try:
            report[name] = stages[name]()
        except (subprocess.CalledProcessError, AssertionError, OSError) as error:
            report[name] = {"failed": str(error)}
            print(f"FAILED: {error}")
        print(f"== {name}: {time.monotonic() - started_s:.0f} s", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1))
    return int(any(isinstance(v, dict) and "failed" in v for v in report.values()))


def check_oracles(oracle: Path) -> dict[str, float]:
    """Largest difference of exact logits to the oracle, by file; top-1 must agree on all rows."""
    worst = {}
    for path in sorted(oracle.glob("*-*.gguf")):
        name = path.stem
        family, _, kind = name.partition("-")
        key = "udmix" if kind == "mtp-udmix" else kind
        expected = np.load(oracle / f"{family}-quant-logits.npz")
        ids = ",".join(map(str, np.load(oracle / f"{family}.npz")["ids"].ravel().tolist()))
        for chunk in ("256", "5", "1"):
            rows = _logits(path, ids, "--exact", "--chunk", chunk)
            wanted = expected[f"{key}.dequant"]
            difference = float(np.abs(rows - wanted).max())
            agreeing = int((rows.argmax(1) == wanted.argmax(1)).sum())
            print(f"{name:<12} chunk {chunk:<4} {difference:.2e}, top-1 {agreeing}/{len(rows)}")
            assert difference < EXACT_TOLERANCE, f"{name}: {difference}"
            assert agreeing == len(rows), f"{name}: top-1 {agreeing}"
            worst[f"{name} chunk {chunk}"] = difference
    return worst


def check_mtp(oracle: Path) -> dict[str, Any]:
    """The MTP block's exact logits; the same greedy answer with drafting, where guesses stand."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for model in sorted(oracle.glob("*-mtp-udmix.gguf")):
            family = model.name.partition("-")[0]
            ids = ",".join(map(str, np.load(oracle / f"{family}.npz")["ids"].ravel().tolist()))
            dump = Path(directory, "dump.npz")
            _logits(model, ids, "--exact", "--mtp", "--dump", str(dump))
            wanted = np.load(oracle / f"{family}-quant-logits.npz")["udmix.mtp_dequant"]
            result[family] = float(np.abs(np.load(dump)["mtp_logits"] - wanted).max())
            assert result[family] < EXACT_TOLERANCE, f"{family}: {result[family]}"
        agreeing = agreeing_model(0.005, seed=2).write(Path(directory, "agreeing.gguf"))
        words = ("chat", "-p", QUESTION, "--temp", "0", "--max-tokens", "100")
        plain, drafted = (
            _infer(*words, *more, model=agreeing) for more in ((), ("--draft", "mtp"))
        )
        result["same_answer"] = plain == drafted
        bench = ("bench", "-p", "16", "-n", "128", "--draft", "mtp", "--json")
        result["bench"] = json.loads(_infer(*bench, model=agreeing))
    print(json.dumps(result))
    assert result["same_answer"], "drafting changes a greedy answer"
    return result


def check_demo() -> dict[str, Any]:
    """The answer, the divergence from exact, the same bits for every budget, and the speed."""
    answer = _infer("chat", "-p", QUESTION, "--temp", "0", model=DEMO).strip()
    assert answer == "Jupiter.", answer
    ids = ",".join(map(str, range(10, 130)))
    exact, default = _logits(DEMO, ids, "--exact"), _logits(DEMO, ids)
    floor = _logits(DEMO, ids, "--gpu-cache", "6M", "--host-cache", "10M")
    on_cpu = _logits(DEMO, ids, "--exact", device="cpu")
    divergence = _divergence(exact, default)
    result = {
        "kl_default_to_exact": divergence,
        "cuda_to_cpu_exact": float(np.abs(exact - on_cpu).max()),
        "same_bits_at_the_floor": bool((floor == default).all()),
        "bench": json.loads(_infer("bench", "-p", "128", "-n", "256", "--json", model=DEMO)),
    }
    print(json.dumps(result))
    assert divergence < 0.01, f"mean KL {divergence}"
    assert result["same_bits_at_the_floor"], "bits depend on the budget"
    return result


def check_vram(n_layers: int) -> dict[str, Any]:
    """What the driver says is in use at the most, with a prompt of 2,000 tokens, under --vram."""
    with tempfile.TemporaryDirectory() as directory, DeviceMemory(0) as memory:
        path = Path(directory, "hy3.gguf")
        _python("tools/make_synthetic.py", "--out", str(path), "--layers", str(n_layers))
        bench = ("bench", "-p", "2000", "-n", "16", "--ctx", "4096", "--vram", VRAM, "--json")
        prefill_tps = json.loads(_infer(*bench, model=path))["prefill_tps"]
    assert memory.peak_bytes is not None, "nvidia-smi does not tell"
    peak_mib = memory.peak_bytes >> 20
    result = {"vram": VRAM, "peak_mib": peak_mib, "prefill_tps": prefill_tps}
    print(json.dumps(result))
    assert peak_mib <= VRAM_MIB, f"{peak_mib} MiB in use"
    return result


def bench_consumer(n_layers: int) -> str:
    """Streaming as on a consumer's machine: its shares of the model, and its disk and bus."""
    arms = ("--arms", "off,auto,off+lane,oracle", "--warmup", "160", "--tokens", "96")
    with _in_memory(n_layers, "hy3") as path:
        return _python("tools/bench_stream.py", *_as_consumer(path, n_layers), *arms)


def bench_prompts(n_layers: int) -> dict[str, str]:
    """Prompts there, of both families; half as many layers of the wider one."""
    tables = {}
    for family, layers in (("hy3", n_layers), ("glm", n_layers // 2)):
        with _in_memory(layers, family) as path:
            words = _as_consumer(path, n_layers)
            tables[family] = _python("tools/bench_prefill.py", *words, "--count", "1")
    return tables


@contextmanager
def _in_memory(n_layers: int, family: str) -> Iterator[Path]:
    """A model of real widths that no disk slows down."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = Path(directory, f"{family}.gguf")
        counts = ("--layers", str(n_layers), "--family", family)
        _python("tools/make_synthetic.py", "--out", str(path), *counts)
        yield path


def _as_consumer(path: Path, n_layers: int) -> tuple[str, ...]:
    share = (n_layers - 1) / 79  # of Hy3's layers with experts
    return (
        *("--model", str(path), "--device", "cuda:0"),
        *("--gpu-cache", f"{5.3 * share:.2f}G", "--host-cache", f"{24 * share:.2f}G"),
        *("--io", "paced:7GB/s:pread", "--upload-pace", "13GB/s"),
    )


def bench_synthetic(n_layers: int) -> dict[str, Any]:
    """A model of Hy3's widths, all experts in GPU slots."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, f"hy3-{n_layers}.gguf")
        _python("tools/make_synthetic.py", "--out", str(path), "--layers", str(n_layers))
        # The first round reads everything from the disk; the last one is measured.
        arguments = ("bench", "-p", "512", "-n", "64", "--warmup", "2", "--json", "--chunk", "512")
        result = json.loads(_infer(*arguments, model=path))
    print(json.dumps(result))
    return dict(result)


def _divergence(exact: np.ndarray, other: np.ndarray) -> float:
    """Mean KL divergence of rows of logits, nats."""
    p, q = (rows.astype(np.float64) for rows in (exact, other))
    p, q = (rows - np.logaddexp.reduce(rows, 1, keepdims=True) for rows in (p, q))
    return float((np.exp(p) * (p - q)).sum(1).mean())


def _logits(model: Path, ids: str, *options: str, device: str = "cuda:0") -> np.ndarray:
    with tempfile.TemporaryDirectory() as directory:
        out = str(Path(directory, "logits.npy"))
        _infer("logits", "--tokens", ids, "--out", out, *options, model=model, device=device)
        rows: np.ndarray = np.load(out)
    return rows


def _infer(command: str, *options: str, model: Path, device: str = "cuda:0") -> str:
    where = ("--model", str(model), "--device", device)
    return _run(sys.executable, "-m", "infer", command, *where, *options)


def _python(*words: str) -> str:
    return _run(sys.executable, *words, show=True)


def _run(*words: str, show: bool = False) -> str:
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, check=False)
    if show or done.returncode:
        print(done.stdout[-6000:], done.stderr[-3000:], flush=True)
    done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
