"""Matrix products on quantised rows, as tasks that threads share.

A task is one matrix times some rows. An item of it is a few rows of the matrix, which are used for
all of the task's inputs while they are in the core's cache. An output is one vec_dot of one
weight row and one input row, whatever else is computed beside it.
"""

import numpy as np
from numba import carray

from infer.kernels.compiled_math import exp32
from infer.kernels.jobs import job_structure, structure, take_item, take_thread
from infer.kernels.numba_cache import inner, kernel, worker
from infer.kernels.numba_calls import at, call_convert, call_dot

# Inputs that stay in the second-level cache while the rows of an item pass over them.
INPUT_BLOCK = 32

# outputs[output_rows[i]] = W inputs[input_rows[i]] for i < count; the items of the task are those
# from first_item up to end_item, item_rows rows of W each. With to_float, weights are dequantised
# into the thread's tile, and vec_dot is F32's.
Task = structure(
    "Task",
    "first_item end_item item_rows"
    " weights weight_stride rows columns vec_dot to_float"
    " inputs input_stride input_rows outputs output_stride output_rows count",
)
MatmulJob = job_structure("MatmulJob", "tasks task_count tiles tile_bytes")
# Floats -> blocks of activations, all contiguous; an item is item_values floats, item_bytes after.
ConvertJob = job_structure(
    "ConvertJob", "from_float values source destination item_values item_bytes"
)
# gate = silu(gate) * up, then converted where from_float is not 0; an item is one row.
HiddenJob = job_structure("HiddenJob", "gate up width from_float destination destination_stride")
_TASK = np.dtype(Task)
_MATMUL = np.dtype(MatmulJob)
_CONVERT = np.dtype(ConvertJob)
_HIDDEN = np.dtype(HiddenJob)


@inner
def _multiply(task, first_row, rows, tile):
    columns, vec_dot, count = task.columns, task.vec_dot, task.count
    stride = task.weight_stride
    weights = task.weights + first_row * stride
    if task.to_float != 0:
        for row in range(rows):
            call_convert(task.to_float, weights + row * stride, tile + row * columns * 4, columns)
        weights, stride = tile, columns * 4
    inputs, input_stride = task.inputs, task.input_stride
    outputs, output_stride = task.outputs + first_row * 4, task.output_stride
    input_rows = carray(at(task.input_rows), count, np.int32)
    output_rows = carray(at(task.output_rows), count, np.int32)
    for start in range(0, count, INPUT_BLOCK):
        for row in range(rows):
            weight_row = weights + row * stride
            for i in range(start, min(start + INPUT_BLOCK, count)):
                call_dot(
                    vec_dot,
                    columns,
                    outputs + output_rows[i] * output_stride + row * 4,
                    weight_row,
                    inputs + input_rows[i] * input_stride,
                )


@worker
def multiply(job_at):
    job = carray(at(job_at), 1, _MATMUL)[0]
    tasks = carray(at(job.tasks), job.task_count, _TASK)
    items = job.items
    tile = job.tiles + take_thread(job_at) * job.tile_bytes
    current = 0
    item = take_item(job_at)
    while item < items:
        while item >= tasks[current].end_item:
            current += 1
        task = tasks[current]
        first_row = (item - task.first_item) * task.item_rows
        _multiply(task, first_row, min(task.item_rows, task.rows - first_row), tile)
        item = take_item(job_at)


@worker
def convert(job_at):
    job = carray(at(job_at), 1, _CONVERT)[0]
    item = take_item(job_at)
    while item < job.items:
        first = item * job.item_values
        call_convert(
            job.from_float,
            job.source + first * 4,
            job.destination + item * job.item_bytes,
            min(job.item_values, job.values - first),
        )
        item = take_item(job_at)


@worker
def hidden(job_at):
    job = carray(at(job_at), 1, _HIDDEN)[0]
    items, width = job.items, job.width
    row = take_item(job_at)
    while row < items:
        address = job.gate + row * width * 4
        gate = carray(at(address), width, np.float32)
        up = carray(at(job.up + row * width * 4), width, np.float32)
        for i in range(width):
            gate[i] = gate[i] / (np.float32(1) + exp32(-gate[i])) * up[i]
        if job.from_float != 0:
            call_convert(
                job.from_float, address, job.destination + row * job.destination_stride, width
            )
        row = take_item(job_at)


@kernel("int64(int64, int64, int64, int64[::1], int32[::1], int32[::1], int32[::1])")
def plan_tasks(tasks, template, first_item, weights, group_start, input_rows, output_rows):
    """Write one task per group at `tasks` and return the item after their last.

    Group g multiplies the matrix at weights[g] by the inputs that input_rows names from
    group_start[g] up to group_start[g + 1]; all else is the template's. Items are numbered from
    first_item.
    """
    groups = len(weights)
    planned = carray(at(tasks), groups, _TASK)
    model = carray(at(template), 1, _TASK)[0]
    item = first_item
    for group in range(groups):
        task = planned[group]
        start = group_start[group]
        planned[group] = model
        task.weights = weights[group]
        task.count = group_start[group + 1] - start
        task.input_rows = input_rows.ctypes.data + start * 4
        task.output_rows = output_rows.ctypes.data + start * 4
        task.first_item = item
        if task.count > 0:
            item += (model.rows + model.item_rows - 1) // model.item_rows
        task.end_item = item
    return item
