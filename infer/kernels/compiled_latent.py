"""Attention of many heads over one key a position, in splits of what a row reads.

A row of queries reads a list of positions: all up to its own, or those selected for it. A split is
SPLIT_ENTRIES entries of that list for one row; it gives each head a partial result as in
`compiled_attention`, and these are merged in the order of the list. Splits begin at fixed entries,
so a row's bits depend neither on the rows beside it nor on the threads.
"""

import numpy as np
from numba import carray

from infer.kernels.compiled_attention import merge_partials
from infer.kernels.compiled_math import dot, dot_four, exp32
from infer.kernels.jobs import job_structure, take_item, take_thread
from infer.kernels.numba_cache import inner, inner_sum, worker
from infer.kernels.numba_calls import at, call_convert

SPLIT_ENTRIES = 128
HEADS_AT_ONCE = 4

# `start` is the position of row 0. A row's list is at `selected`, top_k int32 a row; 0: all
# positions, and top_k is more than there are. to_float is 0 for a float32 cache. A thread's tile
# has HEADS_AT_ONCE * SPLIT_ENTRIES floats for scores, then as many keys. partial [rows, heads,
# splits, 2 + value_width] is as in `compiled_attention`.
LatentJob = job_structure(
    "LatentJob",
    "queries latent out selected rows heads width value_width start top_k splits to_float"
    " tiles tile_bytes partial",
    "scale",
)
_LATENT = np.dtype(LatentJob)


@inner
def _entries(job, row):
    """How many positions a row reads."""
    return min(job.top_k, job.start + row + 1)


@inner
def _keys(job, row, first, count, tile):
    """float32 [count, width]: the keys of some entries of a row's list."""
    width = job.width
    keys = carray(at(tile), (count, width), np.float32)
    if job.selected == 0:
        if job.to_float == 0:
            return carray(at(job.latent + first * width * 4), (count, width), np.float32)
        call_convert(job.to_float, job.latent + first * width * 2, tile, count * width)
        return keys
    selected = carray(at(job.selected + (row * job.top_k + first) * 4), count, np.int32)
    for entry in range(count):
        position = np.int64(selected[entry])
        if job.to_float == 0:
            source = carray(at(job.latent + position * width * 4), width, np.float32)
            target = keys[entry]
            for i in range(width):
                target[i] = source[i]
        else:
            source_at = job.latent + position * width * 2
            call_convert(job.to_float, source_at, tile + entry * width * 4, width)
    return keys


@inner
def _scores(queries, keys, scale, scores):
    """scores [heads, count] of up to HEADS_AT_ONCE heads."""
    heads, width = queries.shape
    if heads == HEADS_AT_ONCE:
        for entry in range(len(keys)):
            a, b, c, d = dot_four(
                queries[0], queries[1], queries[2], queries[3], keys[entry], width
            )
            scores[0, entry] = a * scale
            scores[1, entry] = b * scale
            scores[2, entry] = c * scale
            scores[3, entry] = d * scale
    else:
        for head in range(heads):
            for entry in range(len(keys)):
                scores[head, entry] = dot(queries[head], keys[entry], width) * scale


@inner_sum
def _weigh(scores, keys, total):
    """total = sum of scores[i] * keys[i], as far as total is wide."""
    width, count = len(total), len(keys)
    for i in range(width):
        total[i] = np.float32(0)
    whole = count - count % 4
    for entry in range(0, whole, 4):
        a, b, c, d = scores[entry], scores[entry + 1], scores[entry + 2], scores[entry + 3]
        key_a, key_b, key_c, key_d = keys[entry], keys[entry + 1], keys[entry + 2], keys[entry + 3]
        for i in range(width):
            total[i] += a * key_a[i] + b * key_b[i] + c * key_c[i] + d * key_d[i]
    for entry in range(whole, count):
        weight, key = scores[entry], keys[entry]
        for i in range(width):
            total[i] += weight * key[i]


@inner
def _attend(scores, keys, partial):
    """One head: its scores become weights."""
    highest = np.float32(-np.inf)
    for entry in range(len(keys)):
        highest = max(highest, scores[entry])
    total = np.float32(0)
    for entry in range(len(keys)):
        scores[entry] = exp32(scores[entry] - highest)
        total += scores[entry]
    partial[0] = highest
    partial[1] = total
    _weigh(scores, keys, partial[2:])


@worker
def attend_entries(job_at):
    """An item is one split of one row's list, for all heads."""
    job = carray(at(job_at), 1, _LATENT)[0]
    heads, width, splits = job.heads, job.width, job.splits
    partial_width = 2 + job.value_width
    tile = job.tiles + take_thread(job_at) * job.tile_bytes
    key_tile = tile + HEADS_AT_ONCE * SPLIT_ENTRIES * 4
    item = take_item(job_at)
    while item < job.items:
        row, split = item // splits, item % splits
        first = split * SPLIT_ENTRIES
        count = min(SPLIT_ENTRIES, _entries(job, row) - first)
        if count > 0:
            keys = _keys(job, row, first, count, key_tile)
            scores = carray(at(tile), (HEADS_AT_ONCE, count), np.float32)
            queries = carray(at(job.queries + row * heads * width * 4), (heads, width), np.float32)
            for head in range(0, heads, HEADS_AT_ONCE):
                several = min(HEADS_AT_ONCE, heads - head)
                _scores(queries[head : head + several], keys, np.float32(job.scale), scores)
                for one in range(several):
                    place = ((row * heads + head + one) * splits + split) * partial_width * 4
                    partial = carray(at(job.partial + place), partial_width, np.float32)
                    _attend(scores[one], keys, partial)
        item = take_item(job_at)


@worker
def merge_entries(job_at):
    """An item is one head of one row."""
    job = carray(at(job_at), 1, _LATENT)[0]
    value_width = job.value_width
    index = take_item(job_at)
    while index < job.items:
        seen = (_entries(job, index // job.heads) - 1) // SPLIT_ENTRIES + 1
        place = job.partial + index * job.splits * (2 + value_width) * 4
        partial = carray(at(place), (seen, 2 + value_width), np.float32)
        merge_partials(
            partial, carray(at(job.out + index * value_width * 4), value_width, np.float32)
        )
        index = take_item(job_at)
