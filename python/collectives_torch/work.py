"""Calls under way, as PyTorch's works."""

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

# What PyTorch passes for "as long as the call's own timeout".
_NO_TIMEOUT = timedelta(0)


class CollectivesWork(dist._Work):
    """A call of the backend's. `finish`, if any, puts its result where the caller asked for it, once, by whoever sees the end first."""

    def __init__(self, started, result, finish=None):
        super().__init__()
        self._started = started  # None: it has ended
        self._result = result
        self._finish = finish
        self._has_finish = finish is not None
        self._failure = None
        self._lock = threading.Lock()
        self._future = None

    def _conclude(self):
        """Puts the result in its place; whoever comes meanwhile waits for that, and what it met is everybody's error."""
        with self._lock:
            if self._finish is not None:
                finish, self._finish = self._finish, None
                try:
                    with torch.no_grad():
                        finish()
                except Exception as error:
                    self._failure = error
        if self._failure is not None:
            raise self._failure

    def wait(self, timeout=_NO_TIMEOUT):
        started = self._started
        if started is not None:
            limit = None if timeout == _NO_TIMEOUT else timeout.total_seconds()
            if not started.wait(limit):
                raise dist.DistBackendError(f"Timed out waiting {timeout} for a call, which goes on")
        if self._has_finish:
            self._conclude()
        return True

    def synchronize(self):
        self.wait()

    def is_completed(self):
        if self._started is not None and not self._started.is_done():
            return False
        self.exception()  # which puts the result in its place
        return True

    def is_success(self):
        return self.is_completed() and self.exception() is None

    def exception(self):
        if self._started is not None:
            if not self._started.is_done():
                return None
            failed = self._started.exception()
            if failed is not None:
                return failed
        if self._has_finish:
            try:
                self._conclude()
            except Exception as error:
                return error
        return None

    def source_rank(self):
        return self._started.source()

    def _source_rank(self):
        return self._started.source()

    def result(self):
        self.wait()
        return self._result

    def get_future(self):
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
        if self._started is None:
            self._end_future()
        else:
            self._started.on_end(self._end_future)
        return self._future

    def _end_future(self):
        try:
            self.wait()
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._result)


class JoinedWork(dist._Work):
    """Several calls as one."""

    def __init__(self, works, result):
        super().__init__()
        self._works = works
        self._result = result

    def wait(self, timeout=_NO_TIMEOUT):
        for work in self._works:
            work.wait(timeout)
        return True

    def synchronize(self):
        self.wait()

    def is_completed(self):
        return all(work.is_completed() for work in self._works)

    def is_success(self):
        return all(work.is_success() for work in self._works)

    def exception(self):
        return next((error for error in (work.exception() for work in self._works) if error is not None), None)

    def result(self):
        self.wait()
        return self._result

    def get_future(self):
        result = self._result
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda all_of_them: [future.value() for future in all_of_them.value()] and result)


def ended(result):
    """A call that has ended."""
    return CollectivesWork(None, result)
