"""llama.cpp's half of bench_llama.py; runs under a Python that has the package xllamacpp.

    python llama_worker.py MODEL THREADS CONTEXT

Says "ready", then answers each line {"prompt": [ids], "decode": count} with the seconds of both and
of all. The first two are llama.cpp's own by the wall clock, which leaves out what the package
does around it: from the prompt to its logits and first token; `count` tokens behind that.
"""

import json
import sys
import time

import xllamacpp


def main() -> None:
    model, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    server = xllamacpp.Server(_parameters(model, threads, context))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(server, **json.loads(line))), flush=True)


def _parameters(model: str, threads: int, context: int) -> xllamacpp.CommonParams:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_gpu_layers = 0
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    parameters.n_ctx = context
    parameters.n_parallel = 1
    parameters.cache_ram_mib = 0
    parameters.verbosity = 0
    return parameters


def _run(server: xllamacpp.Server, prompt: list[int], decode: int) -> dict[str, float]:
    """Greedy, without a stop, nothing of an earlier prompt used again."""
    request = {
        "prompt": prompt,
        "n_predict": decode + 1,
        "temperature": 0,
        "samplers": ["top_k"],
        "top_k": 1,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    started_s = time.perf_counter()
    answer = server.handle_completions(request)
    wall_s = time.perf_counter() - started_s
    if "timings" not in answer:
        raise SystemExit(f"llama.cpp says: {json.dumps(answer)}")
    timings = answer["timings"]
    assert timings["prompt_n"] == len(prompt)
    assert timings["predicted_n"] == decode + 1
    prefill_s, decode_s = timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3
    assert prefill_s + decode_s <= wall_s
    return {"prefill_s": prefill_s, "decode_s": decode_s, "wall_s": wall_s}


if __name__ == "__main__":
    main()
