import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


def tied_to_us(when_orphaned: signal.Signals) -> Callable[[], None] | None:
    """For Popen's `preexec_fn`: the child gets this signal when the thread that starts it ends, however it ends (Linux;
    elsewhere nothing is promised). Ask for it in the main thread."""
    if not sys.platform.startswith("linux"):
        return None
    parent = os.getpid()

    def before_exec() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(when_orphaned))
        if os.getppid() != parent:  # it ended before the kernel was told
            os._exit(1)

    return before_exec
