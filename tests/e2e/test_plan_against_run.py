"""What `streamd plan` foretells, against what a daemon of that budget then counts."""

import json

HOST_CACHE = "8M"
TOKENS = 150


def test_the_hit_rate_of_a_recorded_trace_is_the_one_of_the_run(place, demo_model, tmp_path):
    trace = tmp_path / "routing.trace"
    daemon = place.daemon(demo_model, "--host-cache", HOST_CACHE, "--warm", "off", "--trace", trace)
    bench = ("infer", "bench", "-p", 1, "--warmup", 0, "-n", TOKENS, "--prefetch", "off")
    counts = []
    for _ in range(2):  # the first one fills the cache
        done = place.run(*bench, "--name", daemon.name)
        assert done.returncode == 0, done.stderr
        counts.append(place.stats(daemon.name)["tiers"]["host"])
    daemon.stop()
    hits, misses = (counts[1][name] - counts[0][name] for name in ("hits", "misses"))
    done = place.run(
        "streamd", "plan", "--json", "--model", demo_model, "--host-cache", HOST_CACHE,
        "--trace", trace,
    )  # fmt: skip
    forecast = json.loads(done.stdout)["forecast"]
    assert hits + misses >= TOKENS * 24
    assert 0.5 < hits / (hits + misses) < 0.98
    assert abs(forecast["host_hit_rate"] - hits / (hits + misses)) < 0.03
