# ruff: noqa: ARG001 - numba prescribes the parameters of an intrinsic and of its generator
"""What compiled code needs beyond numba's Python: addresses, C function pointers, atomics.

Function addresses are run-time values, so that compiled code can be kept on disk.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_BYTE_POINTER = ir.IntType(8).as_pointer()
_INT = ir.IntType(32)
_LONG = ir.IntType(64)
_VOID = ir.VoidType()


def _call(builder, function, parameter_types, arguments):
    kind = ir.FunctionType(_VOID, parameter_types)
    builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)


@intrinsic
def at(typing_context, address):
    """int64 -> voidptr, for numba.carray."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], _BYTE_POINTER)

    return types.voidptr(types.int64), generate


@intrinsic
def call_dot(typing_context, vec_dot, columns, result, weights, activations):
    """One vec_dot of a row: the float at address `result` becomes weights . activations."""

    def generate(context, builder, signature, arguments):
        function, n, s, x, y = arguments
        s, x, y = (builder.inttoptr(value, _BYTE_POINTER) for value in (s, x, y))
        unused, one_row = ir.Constant(_LONG, 0), ir.Constant(_INT, 1)
        _call(
            builder,
            function,
            [_INT, _BYTE_POINTER, _LONG, _BYTE_POINTER, _LONG, _BYTE_POINTER, _LONG, _INT],
            [builder.trunc(n, _INT), s, unused, x, unused, y, unused, one_row],
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def call_convert(typing_context, convert, source, destination, count):
    """One from_float or to_float of `count` values between two addresses."""

    def generate(context, builder, signature, arguments):
        function, source, destination, count = arguments
        _call(
            builder,
            function,
            [_BYTE_POINTER, _BYTE_POINTER, _LONG],
            [
                builder.inttoptr(source, _BYTE_POINTER),
                builder.inttoptr(destination, _BYTE_POINTER),
                count,
            ],
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def call_worker(typing_context, worker, job):
    """worker(job) in this thread."""

    def generate(context, builder, signature, arguments):
        function, job = arguments
        _call(builder, function, [_BYTE_POINTER], [builder.inttoptr(job, _BYTE_POINTER)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def call_team(typing_context, launcher, worker, job, threads):
    """worker(job) in each of `threads` threads, and wait for all: GOMP_parallel."""

    def generate(context, builder, signature, arguments):
        function, worker, job, threads = arguments
        _call(
            builder,
            function,
            [_BYTE_POINTER, _BYTE_POINTER, _INT, _INT],
            [
                builder.inttoptr(worker, _BYTE_POINTER),
                builder.inttoptr(job, _BYTE_POINTER),
                builder.trunc(threads, _INT),
                ir.Constant(_INT, 0),
            ],
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def add_one(typing_context, job, index):
    """Atomically add 1 to the int64 number `index` of the job; the result is its old value."""

    def generate(context, builder, signature, arguments):
        job, index = arguments
        cells = builder.bitcast(job, _LONG.as_pointer())
        return builder.atomic_rmw(
            "add", builder.gep(cells, [index]), ir.Constant(_LONG, 1), "monotonic"
        )

    return types.int64(types.voidptr, types.int64), generate
