"""Background calls, as PyTorch `Work` objects.

A work has a Python half and a C++ half. If C++ gets a work by calling Python, it keeps both halves. If a program passes
a work to C++, only the C++ half is kept: a reducer keeps the all-reduce of DDP's `join` after the Python object is
gone. So programs get works whose C++ half does not need the Python half.
"""

import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork

from .opaque import opaque, opaque_class

# PyTorch passes this for "as long as the call's own timeout".
_NO_TIMEOUT = timedelta(0)


class Call:
    """A background call. The first thread that sees its end calls `finish`, if any, which puts the result in place."""

    __slots__ = ("_started", "_finish", "_has_finish", "_failure", "_lock", "is_over")

    def __init__(self, started, finish):
        self.is_over = False  # a wait for it has succeeded
        self._started = started
        self._finish = finish
        self._has_finish = finish is not None
        self._failure = None
        self._lock = threading.Lock() if finish is not None else None

    def wait(self, timeout):
        limit = None if timeout == _NO_TIMEOUT else timeout.total_seconds()
        if not self._started.wait(limit):
            raise dist.DistBackendError(f"Timed out after waiting {timeout} for a call, which is still running")
        if self._has_finish:
            self._conclude()
        self.is_over = True

    def _conclude(self):
        """Puts the result in its place. Other threads wait for that meanwhile, and all get its error."""
        with self._lock:
            if self._finish is not None:
                finish, self._finish = self._finish, None
                try:
                    with torch.inference_mode():  # tensors made in this mode can be changed only in it
                        finish()
                except Exception as error:
                    self._failure = error
        if self._failure is not None:
            raise self._failure

    def is_done(self):
        return self._started.is_done()

    def source(self):
        return self._started.source()

    def on_end(self, callback):
        self._started.on_end(callback)


class Calls:
    """Several calls as one."""

    __slots__ = ("_calls", "is_over")

    def __init__(self, calls):
        self.is_over = False
        self._calls = calls

    def wait(self, timeout):
        for call in self._calls:
            call.wait(timeout)
        self.is_over = True

    def is_done(self):
        return all(call.is_done() for call in self._calls)

    def source(self):
        return None

    def on_end(self, callback, after=0):
        """Waits for the calls one after another, so it needs no count of ended calls."""
        if after == len(self._calls):
            callback()
        else:
            self._calls[after].on_end(lambda: self.on_end(callback, after + 1))


@opaque_class
class PendingWork:
    """The Python half of one or more background calls."""

    _future = None

    def _begin(self, call, result):
        self._call = call
        self._result = result

    def wait(self, timeout=_NO_TIMEOUT):
        self._call.wait(timeout)
        return True

    def synchronize(self):
        self.wait()

    def is_completed(self):
        if not self._call.is_done():
            return False
        self.exception()  # which puts the result in its place
        return True

    def is_success(self):
        return self.is_completed() and self.exception() is None

    def exception(self):
        if self._call.is_done():
            try:
                self._call.wait(_NO_TIMEOUT)
            except Exception as error:
                return error
        return None

    def source_rank(self):
        return self._call.source()

    _source_rank = source_rank

    def result(self):
        self.wait()
        return self._result

    def get_future(self):
        """Returns a future, which has ended if the call has. C++ sees only errors that a callback of `then` raises."""
        if self._future is None:
            end = torch.futures.Future()
            future = end.then(_outcome(self._call, self._result))
            if vars(self).setdefault("_future", future) is not future:
                """Another thread was first."""
            elif self._call.is_done():
                end.set_result(None)
            else:
                self._call.on_end(lambda: end.set_result(None))
        return self._future


def _outcome(call, result):
    def outcome(_end):
        call.wait(_NO_TIMEOUT)
        return result

    return outcome


@opaque_class
class HeldWork(PendingWork, dist.Work):
    """A work that C++ gets from a `Backend`. C++ keeps both halves."""

    def __init__(self, call, result):
        super().__init__()
        self._begin(call, result)


@opaque_class
class OwnedWork(PendingWork, PythonCallbackWork):
    """A work that programs get and may pass to C++."""

    def __init__(self, call, result):
        half = self._half = _HalfOfCpp(call, result)
        super().__init__(half.wait)
        half.future = PythonCallbackWork.get_future(self)
        self._begin(call, result)

    def __del__(self):
        self._half.is_left()


@opaque_class
class _HalfOfCpp:
    """The half that C++ waits with. It holds no reference to the work, so the work is freed once it is unused."""

    __slots__ = ("_call", "_result", "future", "_unclaimed")

    def __init__(self, call, result):
        self._call = call
        self._result = result
        self.future = None
        self._unclaimed = [True]

    def wait(self, timeout):
        """
        Ends the future before this returns. C++ would end it with an empty list, or with the error of this wait, and
        could raise that error only once. If a wait times out, the future ends with that error too.
        """
        try:
            self._call.wait(timeout)
        except BaseException as error:
            self._end(_Failure(error))
            raise
        self._end(self._result)
        return True

    def is_left(self):
        """
        Ends the future when the call ends. Python has dropped the work, but C++ may have asked for the future without a
        wait, as DDP does for its buckets. Takes no lock, because the garbage collector may call this anywhere.
        """
        if not self._call.is_over:
            self._call.on_end(self._settle)
        elif self._claim():
            self.future.set_result(self._result)

    def _settle(self):
        try:
            self.wait(_NO_TIMEOUT)
        except Exception:
            """The future has it."""

    def _end(self, value):
        if self._claim():
            self.future.set_result(value)
        elif not self.future.done():
            self.future.wait()

    def _claim(self):
        """Whether the caller must end the future. True for the first caller only."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False


class _Failure:
    """An error as a future's value. C++ finds tensors by pickling values. In an error it finds none, and crashes."""

    __slots__ = ("_kind", "_arguments")

    def __init__(self, error):
        # The error itself refers to frames, and through them to the owner of this.
        self._kind, self._arguments = type(error), error.args

    def __reduce_ex__(self, _protocol):
        raise self._kind(*self._arguments)


@opaque_class
class EndedWork(PythonCallbackWork):
    """The work of a call that has ended."""

    def __init__(self, result):
        super().__init__(_has_ended)
        PythonCallbackWork.get_future(self).set_result(result)
        self._result = result

    def wait(self, timeout=_NO_TIMEOUT):
        return True

    def synchronize(self):
        """Returns at once, because the call has ended."""

    def is_completed(self):
        return True

    is_success = is_completed

    def exception(self):
        return None

    def result(self):
        return self._result


@opaque
def _has_ended(_timeout):
    return True


def joined(works, result, kind):
    """Returns several works as one work of this class."""
    calls = [work._call for work in works if isinstance(work, PendingWork)]
    return kind(Calls(calls), result) if calls else EndedWork(result)
