"""A process of its own that imports GPU memory from a descriptor it inherits.

    gpu_importer.py FD SIZE_BYTES COUNT      prints sha256 of the first COUNT bytes, then waits

It goes when its standard input is closed.
"""

import ctypes
import hashlib
import sys

from infer.daemon.gpu_mapping import import_memory
from shared.cuda import call, load_driver


def main() -> None:
    fd, size_bytes, count = map(int, sys.argv[1:])
    driver = load_driver()
    context = call(driver, "cuDevicePrimaryCtxRetain", call(driver, "cuDeviceGet", 0))
    call(driver, "cuCtxSetCurrent", context)
    memory = import_memory(driver, 0, fd, size_bytes)
    held = ctypes.create_string_buffer(count)
    call(driver, "cuMemcpyDtoH", ctypes.addressof(held), memory.address, count)
    print(hashlib.sha256(held.raw).hexdigest(), memory.writable, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
