"""Elementary functions of the compiled kernels, written so that LLVM makes vector code of them."""

import numpy as np

from infer.kernels.numba_cache import inner, inner_sum

_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts: the first has few enough bits for n * _LN2_HIGH to be exact.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)
_HALF, _ONE = np.float32(0.5), np.float32(1.0)
# Minimax polynomial of (exp(r) - 1 - r) / r^2 on [-ln 2 / 2, ln 2 / 2], as in the Cephes library
_C0, _C1, _C2, _C3, _C4, _C5 = (
    np.float32(value)
    for value in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)


@inner
def exp32(x):
    """exp of a float32 to 2e-7 relative, clamped to [exp(-87), exp(88)]; NaN stays NaN.

    exp(x) = 2^n exp(r) with n = round(x / ln 2).
    """
    # Not min and max, which may drop a NaN
    x = _LOWEST if x < _LOWEST else x
    x = _HIGHEST if x > _HIGHEST else x
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    power_of_two = np.int32((np.int32(n) + 127) << 23).view(np.float32)
    return (p * r * r + r + _ONE) * power_of_two


@inner_sum
def dot(a, b, count):
    total = np.float32(0)
    for i in range(count):
        total += a[i] * b[i]
    return total


@inner_sum
def dot_four(a, b, c, d, x, count):
    """The products of four vectors with x, which is read once."""
    total_a = total_b = total_c = total_d = np.float32(0)
    for i in range(count):
        total_a += a[i] * x[i]
        total_b += b[i] * x[i]
        total_c += c[i] * x[i]
        total_d += d[i] * x[i]
    return total_a, total_b, total_c, total_d


@inner_sum
def sum_of_squares(a, count):
    """In float64."""
    total = 0.0
    for i in range(count):
        total += np.float64(a[i]) * np.float64(a[i])
    return total
