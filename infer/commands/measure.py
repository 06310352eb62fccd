"""`infer logits`, `infer perplexity` and `infer bench`: the model's numbers, for scripts."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from infer.blocks.moe import Tap
from infer.commands.bench_profile import profile_lines, profile_round
from infer.commands.prompt_reads import PromptWatch
from infer.engine import Engine
from infer.generation.decoding import Decoding
from infer.generation.draft import Drafting, mtp_rows
from infer.generation.sampler import Sampler, SamplerConfig
from infer.session import Session
from shared.errors import ConfigError, RequestError, cause_of

# Something to compute on; what it says does not matter.
BENCH_TEXT = (
    "The river rises in the hills, runs past the mill and the old town, and reaches the sea where"
    " the fishermen keep their boats. In spring it carries snow water, in summer one can walk"
    " across. Who owns the bridge? Nobody knows; the toll was given up a hundred years ago. "
)
GREEDY = Sampler(SamplerConfig(temperature=0))


def logits(arguments: argparse.Namespace, session: Session) -> int:
    """float32 [n, vocab] to a .npy file, and what was computed on the way to a .npz."""
    ids = _token_list(arguments.tokens)
    taken: dict[str, list[npt.NDArray[np.generic]]] = {}

    def tap(name: str, values: torch.Tensor) -> None:
        taken.setdefault(name, []).append(values.cpu().numpy().copy())

    engine = session.engine
    rows = engine.logits(ids, tap if arguments.dump else None)
    _save(arguments.out, lambda path: np.save(path, rows))
    if arguments.dump:
        if engine.mtp is not None and len(ids) > 1:
            hidden = np.concatenate(taken[f"hidden.{engine.shape.n_layers}"])
            taken["mtp_logits"] = [mtp_logits(engine, ids, hidden, tap)]
        whole = {name: np.concatenate(parts) for name, parts in taken.items()}
        _save(arguments.dump, lambda path: np.savez(path, **whole))
    return 0


def mtp_logits(
    engine: Engine, ids: list[int], hidden: npt.NDArray[np.generic], tap: Tap | None = None
) -> npt.NDArray[np.float32]:
    """What the MTP block makes of tokens 1, 2, ...: float32 [n - 1, vocab], row 0 for token 2.

    ids [n], hidden [n, width]: what `Model.forward` gives its tap as the last hidden state.
    """
    assert engine.mtp is not None
    kv = engine.mtp.cache.allocate(len(ids), engine.exact, engine.device)
    states = torch.from_numpy(hidden[:-1]).to(engine.device)
    return mtp_rows(engine, ids[1:], states, kv, last_only=False, tap=tap)


def perplexity(arguments: argparse.Namespace, session: Session) -> int:
    """Mean negative log-likelihood of a text, BOS in front where the vocabulary has one."""
    try:
        text = arguments.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {arguments.file}: {cause_of(error)}", "check --file"
        ) from error
    tokenizer = session.tokenizer
    ids = tokenizer.encode(text)
    if tokenizer.bos_id is not None:
        ids.insert(0, tokenizer.bos_id)
    if len(ids) < 2:
        raise RequestError("the text has no token to predict", "give a longer one")
    total = _negative_log_likelihood(session, ids)
    mean = total / (len(ids) - 1)
    result = {"tokens": len(ids), "mean_nll": mean, "perplexity": float(np.exp(mean))}
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"{len(ids)} tokens, mean nll {mean:.5f}, perplexity {result['perplexity']:.3f}")
    return 0


def _negative_log_likelihood(session: Session, ids: list[int]) -> float:
    """Of ids[1:], in windows of the context: a window's first token is predicted from one alone."""
    engine = session.engine
    total = 0.0
    window = engine.kv.context
    started_s = shown_s = time.monotonic()
    for first, last in _parts(len(ids) - 1, window, engine.logits_chunk):
        if first % window == 0:
            engine.kv.truncate(0)
        rows = torch.from_numpy(engine.logits(ids[first:last])).double()
        targets = torch.tensor(ids[first + 1 : last + 1])
        total -= float(torch.log_softmax(rows, -1).gather(1, targets[:, None]).sum())
        now_s = time.monotonic()
        if now_s - shown_s > 1 and sys.stderr.isatty():
            shown_s = now_s
            text = f"{last} of {len(ids)} tokens, {now_s - started_s:.0f} s"
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
    if shown_s > started_s:
        print(file=sys.stderr)
    return total


def _parts(token_count: int, window: int, most: int) -> Iterator[tuple[int, int]]:
    """First and last token of stretches of at most `most` that cross no border of a window: logits
    of no more tokens than that are in memory at once."""
    for begin in range(0, token_count, window):
        end = min(begin + window, token_count)
        for first in range(begin, end, most):
            yield first, min(first + most, end)


def bench(arguments: argparse.Namespace, session: Session) -> int:
    """Tokens per second by the wall clock: prompt, then greedy decode without a stop."""
    engine, decoding = session.engine, Decoding(session.engine)
    text_ids = session.tokenizer.encode(BENCH_TEXT)
    prompt = (text_ids * (arguments.prompt // len(text_ids) + 1))[: arguments.prompt]
    engine.kv.make_room(arguments.prompt + arguments.decode)
    prefill_s = decode_s = 0.0
    for _ in range(1 + arguments.warmup):
        before = engine.client.stats()
        slots_before = engine.client.tier_values(before)
        guessed_before = engine.prefetch.counters.copy() if engine.prefetch else None
        lane_before = replace(engine.lane.counters) if engine.lane else None
        watch = PromptWatch(engine)
        prefill_s = time_prompt(decoding, prompt)
        prompt_reads = watch.reads(arguments.prompt)
        decode_s = time_decode(decoding, arguments.decode)
    after = engine.client.stats()
    slots_after = engine.client.tier_values(after)
    counted = {
        name: slots_after[name] - slots_before[name] for name in ("hits", "misses", "evictions")
    }
    result = {
        "prefill_tps": arguments.prompt / prefill_s,
        "decode_tps": arguments.decode / decode_s,
        "startup_s": session.startup_s,
        "prefill_tokens": arguments.prompt,
        "decode_tokens": arguments.decode,
        "bytes_read": after["io"]["bytes_read"] - before["io"]["bytes_read"],
        "device": str(engine.device),
        "prompt": prompt_reads.values(),
        **counted,
    }
    if engine.prefetch is not None:
        result["prefetch"] = engine.prefetch.values(guessed_before)
    if engine.lane is not None:
        result["compute_lane"] = engine.lane.values(lane_before)
    if engine.mtp is not None:
        result |= _bench_draft(engine, prompt, arguments, result["decode_tps"])
    if arguments.profile:
        result["profile"] = profile_round(engine, decoding, prompt, arguments.decode, GREEDY)
    if arguments.json:
        print(json.dumps(result))
        return 0
    lookups = counted["hits"] + counted["misses"]
    print(f"prefill  {result['prefill_tps']:9.1f} t/s  ({arguments.prompt} tokens)")
    print(f"decode   {result['decode_tps']:9.1f} t/s  ({arguments.decode} tokens)")
    print(f"startup  {session.startup_s:9.2f} s")
    print(
        f"experts  {100 * counted['hits'] / max(lookups, 1):8.1f}% of {lookups} lookups were hits"
    )
    print(f"prompt   {prompt_reads.describe()}")
    if engine.prefetch is not None and (ahead := engine.prefetch.describe(guessed_before)):
        print(f"ahead    {ahead}")
    if engine.lane is not None:
        print(f"lane     {engine.lane.describe(lane_before)}")
    if "draft_decode_tps" in result:
        print(
            f"drafting {result['draft_decode_tps']:9.1f} t/s, {result['draft_speedup']:.2f} times"
            f" that; {100 * result['draft_accepted_share']:.1f}% of the guesses stood"
        )
    if arguments.profile:
        print("\n".join(profile_lines(result["profile"])))
    return 0


def _bench_draft(
    engine: Engine, prompt: list[int], arguments: argparse.Namespace, plain_tps: float
) -> dict[str, float]:
    """The same tokens with guesses verified; decoding without them was measured just before."""
    drafting = Drafting(engine)
    for _ in range(1 + arguments.warmup):
        drafting.guessed_count = drafting.accepted_count = 0
        _, decode_s = time_round(drafting, prompt, arguments.decode)
    return {
        "draft_decode_tps": arguments.decode / decode_s,
        "draft_speedup": arguments.decode / decode_s / plain_tps,
        "draft_accepted_share": drafting.accepted_count / max(drafting.guessed_count, 1),
    }


def time_round(decoding: Decoding, prompt: list[int], token_count: int) -> tuple[float, float]:
    """Seconds for the prompt, and for as many greedy tokens behind it."""
    return time_prompt(decoding, prompt), time_decode(decoding, token_count)


def time_prompt(decoding: Decoding, prompt: list[int]) -> float:
    """Seconds, from an empty cache of keys and values on."""
    decoding.rewind(0)
    started_s = time.perf_counter()
    decoding.extend(prompt)
    return time.perf_counter() - started_s


def time_decode(decoding: Decoding, token_count: int) -> float:
    started_s = time.perf_counter()
    for _ in range(token_count):
        decoding.take(decoding.draw(GREEDY), GREEDY)
    return time.perf_counter() - started_s


def _token_list(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise RequestError(f"--tokens {text!r} is no list", "give ids such as 1,2,3") from error


def _save(path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", "choose another file"
        ) from error
