"""How many cores does a benchmark have to itself? One thread per core spins for a moment; the processor time that they
got is counted.

On a quiet machine the result is the number of cores. If other programs are running it is lower, and the figures are
less reliable.
"""

import hashlib
import threading
import time

from rowcast.runtime.machine import usable_cores

SPIN_S = 0.5
CONTENT = bytes(2**20)  # hashed without the interpreter's lock


def free_cores(seconds: float = SPIN_S) -> float:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()

    def spin() -> None:
        while time.perf_counter() - began_s < seconds:
            hashlib.sha256(CONTENT)

    threads = [threading.Thread(target=spin) for _ in range(usable_cores())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.process_time() - began_cpu_s) / (time.perf_counter() - began_s)
