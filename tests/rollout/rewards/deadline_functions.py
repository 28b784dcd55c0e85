"""What the processes of test_deadline.py run."""

import os
import signal
import time


def work(what: str, value: float = 0.0):
    if what == "sleep":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(value)
    elif what == "power":
        return 10 ** (10**10) > 0  # one operation: no Python code runs in this process until it is done
    elif what == "memory":
        return len(bytearray(int(value)))
    elif what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raise":
        raise KeyError(f"no {value}")
    elif what == "time out":
        raise TimeoutError("a server was silent")
    elif what == "pid":
        return os.getpid()
    elif what == "environment":
        return sorted(name for name in os.environ if name.endswith("RANK"))
    return value
