"""The small operations: each row, of a norm, a head or a token, by itself."""

import numpy as np
from numba import carray

from infer.kernels.compiled_math import exp32, sum_of_squares
from infer.kernels.jobs import job_structure, take_item, take_thread
from infer.kernels.numba_cache import inner, worker
from infer.kernels.numba_calls import at, call_convert

# An item is `item_rows` rows.
NormJob = job_structure("NormJob", "x weight out rows width item_rows", "eps")
# A row is one token's heads.
RopeJob = job_structure("RopeJob", "x cos sin rows heads head_dim half start first item_rows")
# `scratch` has room for 2 x experts floats a thread.
RouteJob = job_structure(
    "RouteJob", "logits bias ids weights rows experts top_k scratch item_rows", "scale"
)
SumJob = job_structure("SumJob", "inputs weights shared out rows terms width item_rows")
AddJob = job_structure("AddJob", "x added rows width item_rows")
EmbedJob = job_structure("EmbedJob", "matrix row_bytes to_float ids out rows columns item_rows")

_NORM = np.dtype(NormJob)
_ROPE = np.dtype(RopeJob)
_ROUTE = np.dtype(RouteJob)
_SUM = np.dtype(SumJob)
_ADD = np.dtype(AddJob)
_EMBED = np.dtype(EmbedJob)


@inner
def _floats(address, count):
    return carray(at(address), count, np.float32)


@inner
def _rows(job, item):
    first = item * job.item_rows
    return range(first, min(first + job.item_rows, job.rows))


@worker
def rms_norm(job_at):
    job = carray(at(job_at), 1, _NORM)[0]
    width = job.width
    weight = _floats(job.weight, width)
    item = take_item(job_at)
    while item < job.items:
        for row in _rows(job, item):
            x = _floats(job.x + row * width * 4, width)
            out = _floats(job.out + row * width * 4, width)
            factor = np.float32(1.0 / np.sqrt(sum_of_squares(x, width) / width + job.eps))
            for i in range(width):
                out[i] = x[i] * factor * weight[i]
        item = take_item(job_at)


@worker
def rope(job_at):
    job = carray(at(job_at), 1, _ROPE)[0]
    half, heads, head_dim = job.half, job.heads, job.head_dim
    item = take_item(job_at)
    while item < job.items:
        for row in _rows(job, item):
            cos = _floats(job.cos + (job.start + row) * half * 4, half)
            sin = _floats(job.sin + (job.start + row) * half * 4, half)
            for head in range(heads):
                x = _floats(job.x + (row * heads + head) * head_dim * 4, head_dim)
                for i in range(half):
                    first, second = x[i], x[half + i]
                    x[i] = first * cos[i] - second * sin[i]
                    x[half + i] = second * cos[i] + first * sin[i]
        item = take_item(job_at)


@worker
def rope_pairs(job_at):
    job = carray(at(job_at), 1, _ROPE)[0]
    half, heads, head_dim = job.half, job.heads, job.head_dim
    item = take_item(job_at)
    while item < job.items:
        for row in _rows(job, item):
            cos = _floats(job.cos + (job.start + row) * half * 4, half)
            sin = _floats(job.sin + (job.start + row) * half * 4, half)
            for head in range(heads):
                place = (row * heads + head) * head_dim + job.first
                x = _floats(job.x + place * 4, 2 * half)
                for i in range(half):
                    even, odd = x[2 * i], x[2 * i + 1]
                    x[2 * i] = even * cos[i] - odd * sin[i]
                    x[2 * i + 1] = odd * cos[i] + even * sin[i]
        item = take_item(job_at)


@inner
def _next_best(scores, previous):
    """The index that follows `previous` in the order by descending score, then ascending index."""
    best = -1
    for i in range(len(scores)):
        after = previous < 0 or scores[i] < scores[previous]
        after = after or (scores[i] == scores[previous] and i > previous)
        if after and (best < 0 or scores[i] > scores[best]):
            best = i
    return best


@worker
def route_sigmoid(job_at):
    job = carray(at(job_at), 1, _ROUTE)[0]
    experts, top_k = job.experts, job.top_k
    scratch = job.scratch + take_thread(job_at) * experts * 8
    p, scores = _floats(scratch, experts), _floats(scratch + experts * 4, experts)
    bias = _floats(job.bias, experts)
    item = take_item(job_at)
    while item < job.items:
        for row in _rows(job, item):
            logits = _floats(job.logits + row * experts * 4, experts)
            for i in range(experts):
                p[i] = np.float32(1) / (np.float32(1) + exp32(-logits[i]))
                scores[i] = p[i] if job.bias == 0 else p[i] + bias[i]
                if scores[i] != scores[i]:
                    scores[i] = np.float32(-np.inf)
            ids = carray(at(job.ids + row * top_k * 4), top_k, np.int32)
            weights = _floats(job.weights + row * top_k * 4, top_k)
            total = np.float32(0)
            previous = -1
            for rank in range(top_k):
                previous = _next_best(scores, previous)
                ids[rank] = previous
                weights[rank] = p[previous]
                total += p[previous]
            factor = np.float32(job.scale) / (total + np.float32(1e-20))
            for rank in range(top_k):
                weights[rank] *= factor
        item = take_item(job_at)


@worker
def weighted_sum(job_at):
    job = carray(at(job_at), 1, _SUM)[0]
    terms, width = job.terms, job.width
    item = take_item(job_at)
    while item < job.items:
        for row in _rows(job, item):
            weights = _floats(job.weights + row * terms * 4, terms)
            out = _floats(job.out + row * width * 4, width)
            for i in range(width):
                out[i] = np.float32(0)
            for term in range(terms):
                weight = weights[term]
                values = _floats(job.inputs + (row * terms + term) * width * 4, width)
                for i in range(width):
                    out[i] += weight * values[i]
            if job.shared != 0:
                shared = _floats(job.shared + row * width * 4, width)
                for i in range(width):
                    out[i] += shared[i]
        item = take_item(job_at)


@worker
def add(job_at):
    job = carray(at(job_at), 1, _ADD)[0]
    width = job.width
    item = take_item(job_at)
    while item < job.items:
        for row in _rows(job, item):
            x = _floats(job.x + row * width * 4, width)
            added = _floats(job.added + row * width * 4, width)
            for i in range(width):
                x[i] += added[i]
        item = take_item(job_at)


@worker
def embed(job_at):
    job = carray(at(job_at), 1, _EMBED)[0]
    columns = job.columns
    ids = carray(at(job.ids), job.rows, np.int64)
    item = take_item(job_at)
    while item < job.items:
        for row in _rows(job, item):
            source = job.matrix + ids[row] * job.row_bytes
            target = job.out + row * columns * 4
            if job.to_float != 0:
                call_convert(job.to_float, source, target, columns)
            else:
                copy = _floats(target, columns)
                original = _floats(source, columns)
                for i in range(columns):
                    copy[i] = original[i]
        item = take_item(job_at)
