"""Causal attention over a cache, in splits of the context that threads share.

A split is SPLIT_POSITIONS positions of one kv head. For each query head it gives a partial result
(maximum score m, sum l of exp(score - m), sum of exp(score - m) * value), and the partial results
of a head are merged in order of position. Splits lie at fixed positions, so a query's bits depend
neither on the queries beside it nor on the threads.
"""

import numpy as np
from numba import carray

from infer.kernels.compiled_math import dot, exp32
from infer.kernels.jobs import job_structure, take_item, take_thread
from infer.kernels.numba_cache import inner, inner_sum, worker
from infer.kernels.numba_calls import at, call_convert

SPLIT_POSITIONS = 256

# `start` is the position of row 0 of queries. to_float is 0 for a float32 cache. A thread's tile
# has SPLIT_POSITIONS floats for scores, then as many keys and as many values where to_float needs
# them. partial [rows, heads, splits, 2 + head_dim] holds m, l and the weighted values.
AttentionJob = job_structure(
    "AttentionJob",
    "queries keys values out rows heads kv_heads head_dim start splits to_float"
    " tiles tile_bytes partial",
    "scale",
)
_ATTENTION = np.dtype(AttentionJob)


@inner
def _head_rows(job, address, kv_head, first, count, tile):
    """float32 [count, >= head_dim]: one kv head's rows from `first`, in place or converted."""
    width, head_dim = job.kv_heads * job.head_dim, job.head_dim
    if job.to_float == 0:
        return carray(
            at(address + (first * width + kv_head * head_dim) * 4), (count, width), np.float32
        )
    for row in range(count):
        source = address + ((first + row) * width + kv_head * head_dim) * 2
        call_convert(job.to_float, source, tile + row * head_dim * 4, head_dim)
    return carray(at(tile), (count, head_dim), np.float32)


@inner_sum
def _scores(query, keys, scale, scores, visible):
    """Write the scores and return the largest."""
    highest = np.float32(-np.inf)
    for position in range(visible):
        score = dot(query, keys[position], len(query)) * scale
        scores[position] = score
        highest = max(highest, score)
    return highest


@inner_sum
def _weigh(scores, values, total, visible):
    """total = sum of scores[i] * values[i]."""
    for i in range(len(total)):
        total[i] = np.float32(0)
    for position in range(visible):
        weight = scores[position]
        value = values[position]
        for i in range(len(total)):
            total[i] += weight * value[i]


@inner
def _attend(query, keys, values, scale, scores, visible, partial):
    highest = _scores(query, keys, scale, scores, visible)
    for position in range(visible):
        scores[position] = exp32(scores[position] - highest)
    total = np.float32(0)
    for position in range(visible):
        total += scores[position]
    partial[0] = highest
    partial[1] = total
    _weigh(scores, values, partial[2:], visible)


@worker
def attend_splits(job_at):
    """An item is one split of one kv head, for all rows of queries."""
    job = carray(at(job_at), 1, _ATTENTION)[0]
    heads, kv_heads, head_dim, splits = job.heads, job.kv_heads, job.head_dim, job.splits
    group = heads // kv_heads
    end = job.start + job.rows
    scale = np.float32(job.scale)
    tile = job.tiles + take_thread(job_at) * job.tile_bytes
    scores = carray(at(tile), SPLIT_POSITIONS, np.float32)
    key_tile = tile + SPLIT_POSITIONS * 4
    value_tile = key_tile + SPLIT_POSITIONS * head_dim * 4
    item = take_item(job_at)
    while item < job.items:
        kv_head, split = item % kv_heads, item // kv_heads
        first = split * SPLIT_POSITIONS
        count = min(SPLIT_POSITIONS, end - first)
        keys = _head_rows(job, job.keys, kv_head, first, count, key_tile)
        values = _head_rows(job, job.values, kv_head, first, count, value_tile)
        for row in range(max(0, first - job.start), job.rows):
            visible = min(count, job.start + row + 1 - first)
            for head in range(kv_head * group, (kv_head + 1) * group):
                index = row * heads + head
                query = carray(at(job.queries + index * head_dim * 4), head_dim, np.float32)
                place = job.partial + (index * splits + split) * (2 + head_dim) * 4
                partial = carray(at(place), 2 + head_dim, np.float32)
                _attend(query, keys, values, scale, scores, visible, partial)
        item = take_item(job_at)


@inner
def merge_partials(partial, out):
    """partial [splits, 2 + len(out)]"""
    splits = len(partial)
    highest = partial[0, 0]
    for split in range(1, splits):
        highest = max(highest, partial[split, 0])
    for i in range(len(out)):
        out[i] = np.float32(0)
    total = np.float32(0)
    for split in range(splits):
        factor = exp32(partial[split, 0] - highest)
        total += factor * partial[split, 1]
        for i in range(len(out)):
            out[i] += factor * partial[split, 2 + i]
    for i in range(len(out)):
        out[i] /= total


@worker
def merge_splits(job_at):
    """An item is one head of one row."""
    job = carray(at(job_at), 1, _ATTENTION)[0]
    head_dim = job.head_dim
    index = take_item(job_at)
    while index < job.items:
        seen = (job.start + index // job.heads) // SPLIT_POSITIONS + 1
        place = job.partial + index * job.splits * (2 + head_dim) * 4
        partial = carray(at(place), (seen, 2 + head_dim), np.float32)
        merge_partials(partial, carray(at(job.out + index * head_dim * 4), head_dim, np.float32))
        index = take_item(job_at)
