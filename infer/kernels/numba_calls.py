# ruff: noqa: ARG001 - numba prescribes the parameters of an intrinsic and of its generator
"""What compiled code needs beyond numba's Python: addresses, C function pointers, atomics.

Every address is an int64. Those of functions are run-time values, so that compiled code can be kept
on disk. Atomic operations are sequentially consistent.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_POINTER = ir.IntType(8).as_pointer()
_INT = ir.IntType(32)
_LONG = ir.IntType(64)
_VOID = ir.VoidType()
_ORDER = "seq_cst"


def _call(builder, function, parameters):
    """Call the C function at an address; `parameters` are pairs of type and int64 value."""
    convert = {_POINTER: builder.inttoptr, _INT: builder.trunc}
    arguments = [
        convert[kind](value, kind) if kind in convert else value for kind, value in parameters
    ]
    kind = ir.FunctionType(_VOID, [kind for kind, _ in parameters])
    builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)


def _cell(builder, address):
    return builder.inttoptr(address, _LONG.as_pointer())


def _takes_addresses(count, result=types.void):
    return result(*[types.int64] * count)


@intrinsic
def at(typing_context, address):
    """int64 -> voidptr, for numba.carray."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], _POINTER)

    return _takes_addresses(1, types.voidptr), generate


@intrinsic
def call_dot(typing_context, vec_dot, columns, result, weights, activations):
    """One vec_dot of a row: the float at address `result` becomes weights . activations."""

    def generate(context, builder, signature, arguments):
        function, n, s, x, y = arguments
        unused, one_row = (_LONG, ir.Constant(_LONG, 0)), (_INT, ir.Constant(_LONG, 1))
        pointers = [(_POINTER, s), unused, (_POINTER, x), unused, (_POINTER, y), unused]
        _call(builder, function, [(_INT, n), *pointers, one_row])
        return context.get_dummy_value()

    return _takes_addresses(5), generate


@intrinsic
def call_convert(typing_context, convert, source, destination, count):
    """One from_float or to_float of `count` values between two addresses."""

    def generate(context, builder, signature, arguments):
        function, source, destination, count = arguments
        _call(builder, function, [(_POINTER, source), (_POINTER, destination), (_LONG, count)])
        return context.get_dummy_value()

    return _takes_addresses(4), generate


@intrinsic
def call_nothing(typing_context, function):
    """function()"""

    def generate(context, builder, signature, arguments):
        _call(builder, arguments[0], [])
        return context.get_dummy_value()

    return _takes_addresses(1), generate


@intrinsic
def call_one(typing_context, function, first):
    """function(first)"""

    def generate(context, builder, signature, arguments):
        _call(builder, arguments[0], [(_POINTER, arguments[1])])
        return context.get_dummy_value()

    return _takes_addresses(2), generate


@intrinsic
def call_two(typing_context, function, first, second):
    """function(first, second)"""

    def generate(context, builder, signature, arguments):
        _call(builder, arguments[0], [(_POINTER, value) for value in arguments[1:]])
        return context.get_dummy_value()

    return _takes_addresses(3), generate


@intrinsic
def atomic_load(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.load_atomic(_cell(builder, arguments[0]), _ORDER, 8)

    return _takes_addresses(1, types.int64), generate


@intrinsic
def atomic_swap(typing_context, address, value):
    """Store the value; the result is the old one."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("xchg", _cell(builder, arguments[0]), arguments[1], _ORDER)

    return _takes_addresses(2, types.int64), generate


@intrinsic
def atomic_add(typing_context, address, value):
    """Add the value; the result is the old one."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("add", _cell(builder, arguments[0]), arguments[1], _ORDER)

    return _takes_addresses(2, types.int64), generate


@intrinsic
def atomic_replace(typing_context, address, expected, value):
    """Store the value if the old one is `expected`; the result says whether it was."""

    def generate(context, builder, signature, arguments):
        address, expected, value = arguments
        pair = builder.cmpxchg(_cell(builder, address), expected, value, _ORDER, _ORDER)
        return builder.extract_value(pair, 1)

    return _takes_addresses(3, types.boolean), generate
