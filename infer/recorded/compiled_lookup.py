"""The host's answer to a router on the GPU, in one compiled call: wait for ids, give addresses.

What it does to shared memory is what `SlotClient.begin` does, by docs/protocol.md.
"""

import numpy as np
from numba import carray

from infer.kernels.numba_cache import kernel
from infer.kernels.numba_calls import at, atomic_load, atomic_swap

# Results that are no count of missing experts.
NO_ANSWER, REVOKED = -1, -2

# All but `step`, `top_k` and `spins` are addresses.
LOOKUP = np.dtype(
    [
        ("mail", np.int64),  # the step, int64, and the ids, int32 [top_k]
        ("step", np.int64),
        ("spins", np.int64),
        ("top_k", np.int64),
        ("revoked", np.int64),  # uint32
        ("epoch", np.int64),  # uint64
        ("words", np.int64),  # uint64: published, section
        ("counters", np.int64),  # uint64: hits, misses
        ("row", np.int64),  # of the table, int32
        ("uses", np.int64),  # of the layer, uint32
        ("stretches", np.int64),  # where parts begin, int64 [slots, 3]
        ("addresses", np.int64),  # int64 [4, top_k]; 0 where an expert is missing, and in the last
    ]
)


@kernel("int64(int64)")
def answer_router(lookup_at):
    """Wait for the step's ids, end the section before and enter one, look the experts up.

    -> how many are missing; NO_ANSWER after `spins` looks at the mailbox; REVOKED, in which case
    the section before is not ended.
    """
    lookup = carray(at(lookup_at), 1, LOOKUP)[0]
    spins = lookup.spins
    while atomic_load(lookup.mail) != lookup.step:
        spins -= 1
        if spins == 0:
            return NO_ANSWER
    # Only now is the GPU done with what the section before has read.
    if carray(at(lookup.revoked), 1, np.uint32)[0] != 0:
        return REVOKED
    words = carray(at(lookup.words), 2, np.uint64)
    words[1] += np.uint64(1)
    epoch = atomic_load(lookup.epoch)
    while True:
        atomic_swap(lookup.words, epoch)
        again = atomic_load(lookup.epoch)
        if again == epoch:
            break
        epoch = again
    top_k = lookup.top_k
    ids = carray(at(lookup.mail + 8), top_k, np.int32)
    row = carray(at(lookup.row), 1 << 20, np.int32)
    uses = carray(at(lookup.uses), 1 << 20, np.uint32)
    stretches = carray(at(lookup.stretches), 1 << 30, np.int64)
    addresses = carray(at(lookup.addresses), 4 * top_k, np.int64)
    missing = 0
    for rank in range(top_k):
        expert = ids[rank]
        uses[expert] += np.uint32(1)
        slot = row[expert]
        missing += slot < 0
        for part in range(3):
            address = np.int64(0) if slot < 0 else stretches[3 * slot + part]
            addresses[part * top_k + rank] = address
        addresses[3 * top_k + rank] = 0  # no row of it is computed yet
    counters = carray(at(lookup.counters), 2, np.uint64)
    counters[0] += np.uint64(top_k - missing)
    counters[1] += np.uint64(missing)
    return missing
