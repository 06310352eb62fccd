"""Which positions a sparse attention reads: scores of all of them, then the best."""

import numpy as np
from numba import carray

from infer.kernels.compiled_math import dot, dot_four
from infer.kernels.jobs import job_structure, take_item, take_thread
from infer.kernels.numba_cache import inner, worker
from infer.kernels.numba_calls import at, call_convert

SCORE_POSITIONS = 256
# A score's bits are looked at in digits of so many, the highest first.
_DIGIT_BITS = (11, 11, 10)
HISTOGRAM_BYTES = 8 << 11

# scores [rows, end], end = start + rows: row i has them up to its own position. to_float is 0 for
# float32 keys; else a thread's tile has room for SCORE_POSITIONS of them.
ScoreJob = job_structure(
    "ScoreJob", "queries weights keys scores rows heads width start to_float tiles tile_bytes"
)
# out int32 [rows, top_k]; a thread's histogram is HISTOGRAM_BYTES long.
SelectJob = job_structure("SelectJob", "scores out rows start top_k histograms")
_SCORE = np.dtype(ScoreJob)
_SELECT = np.dtype(SelectJob)


@inner
def _score(queries, weights, key):
    heads, width = queries.shape
    whole = heads - heads % 4
    total = np.float32(0)
    for head in range(0, whole, 4):
        a, b, c, d = dot_four(
            queries[head], queries[head + 1], queries[head + 2], queries[head + 3], key, width
        )
        total += weights[head] * max(a, np.float32(0))
        total += weights[head + 1] * max(b, np.float32(0))
        total += weights[head + 2] * max(c, np.float32(0))
        total += weights[head + 3] * max(d, np.float32(0))
    for head in range(whole, heads):
        total += weights[head] * max(dot(queries[head], key, width), np.float32(0))
    return total


@worker
def score_positions(job_at):
    """An item is SCORE_POSITIONS positions, for all rows."""
    job = carray(at(job_at), 1, _SCORE)[0]
    rows, heads, width, end = job.rows, job.heads, job.width, job.start + job.rows
    tile = job.tiles + take_thread(job_at) * job.tile_bytes
    item = take_item(job_at)
    while item < job.items:
        first = item * SCORE_POSITIONS
        count = min(SCORE_POSITIONS, end - first)
        keys = carray(at(job.keys + first * width * 4), (count, width), np.float32)
        if job.to_float != 0:
            call_convert(job.to_float, job.keys + first * width * 2, tile, count * width)
            keys = carray(at(tile), (count, width), np.float32)
        for row in range(max(0, first - job.start), rows):
            queries = carray(at(job.queries + row * heads * width * 4), (heads, width), np.float32)
            weights = carray(at(job.weights + row * heads * 4), heads, np.float32)
            scores = carray(at(job.scores + (row * end + first) * 4), count, np.float32)
            for position in range(min(count, job.start + row + 1 - first)):
                scores[position] = _score(queries, weights, keys[position])
        item = take_item(job_at)


@inner
def _ordered(score):
    """An integer of 32 bits that grows with the score."""
    # 0.0: a negative zero is no less than zero
    bits = np.int64(np.float32(score + np.float32(0)).view(np.uint32))
    return bits ^ 0xFFFFFFFF if bits & 0x80000000 else bits | 0x80000000


@inner
def _find_digit(scores, histogram, known, shift, bits, wanted):
    """The next digit of the wanted-th largest score, and how many are wanted of those that have it.

    `known` are the digits above, as a number.
    """
    for digit in range(1 << bits):
        histogram[digit] = 0
    for score in scores:
        value = _ordered(score)
        if value >> (shift + bits) == known:
            histogram[(value >> shift) & ((1 << bits) - 1)] += 1
    digit = (1 << bits) - 1
    while histogram[digit] < wanted:
        wanted -= histogram[digit]
        digit -= 1
    return digit, wanted


@inner
def _select(scores, histogram, out):
    """The positions of the len(out) largest scores, ties to the lower, in ascending order."""
    lowest, shift, ties = 0, 32, len(out)
    for bits in _DIGIT_BITS:
        shift -= bits
        digit, ties = _find_digit(scores, histogram, lowest, shift, bits, ties)
        lowest = lowest << bits | digit
    found = 0
    for position in range(len(scores)):
        value = _ordered(scores[position])
        if value > lowest or (value == lowest and ties > 0):
            out[found] = position
            found += 1
            if value == lowest:
                ties -= 1


@worker
def select_positions(job_at):
    """An item is one row."""
    job = carray(at(job_at), 1, _SELECT)[0]
    top_k, end = job.top_k, job.start + job.rows
    place = job.histograms + take_thread(job_at) * HISTOGRAM_BYTES
    histogram = carray(at(place), HISTOGRAM_BYTES // 8, np.int64)
    row = take_item(job_at)
    while row < job.items:
        visible = job.start + row + 1
        out = carray(at(job.out + row * top_k * 4), top_k, np.int32)
        if visible <= top_k:
            for i in range(top_k):
                out[i] = i
        else:
            _select(carray(at(job.scores + row * end * 4), visible, np.float32), histogram, out)
        row = take_item(job_at)
