"""Makes Ctrl-C end a call that blocks the main thread (see `src/interrupt.rs`)."""

import os
import signal
import threading

from . import _core

# The process in which this has been set up, and the descriptor to which Python writes the numbers of signals there.
_process = _descriptor = None


def end_blocked_calls():
    """
    Sets Ctrl-C up, once in each process. Does nothing on another thread than the main one, which alone may do this, or
    if the program reads Python's wakeup descriptor itself.
    """
    global _process, _descriptor
    if _process == os.getpid() or threading.current_thread() is not threading.main_thread():
        return
    _process = os.getpid()
    programs = signal.set_wakeup_fd(-1)
    if programs != -1:
        signal.set_wakeup_fd(programs)
        return
    _descriptor = _core.read_signals()
    os.set_blocking(_descriptor, False)
    signal.set_wakeup_fd(_descriptor, warn_on_full_buffer=False)


def _forget():
    """A forked child must not report its signals to its parent."""
    global _descriptor
    if _descriptor is not None:
        programs = signal.set_wakeup_fd(-1)
        if programs not in (-1, _descriptor):
            signal.set_wakeup_fd(programs)
        _descriptor = None


os.register_at_fork(after_in_child=_forget)
