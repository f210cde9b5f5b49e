"""A barrier that names missing ranks: each rank sends a message to rank 0, which answers once all have arrived."""

import time

import torch
import torch.distributed as dist

# Above the tags of messages. Each barrier has its own tag, so no rank accepts a message of an earlier barrier.
_TAG = 1 << 32


def monitored_barrier(backend, number, timeout, wait_all_ranks):
    """
    Raises on all ranks if one does not arrive within `timeout`. Rank 0 names the first missing rank, or all of them
    with `wait_all_ranks`.
    """
    seconds = backend._seconds if timeout is None or timeout.total_seconds() < 0 else timeout.total_seconds()
    word = torch.tensor([number], dtype=torch.int64)
    if backend.rank() == 0:
        _await_others(backend, number, word, seconds, wait_all_ranks)
    else:
        _report(backend, number, word, seconds)


def _message(backend, send, tensor, rank, tag, seconds):
    from .tensors import memory

    call = backend._group.send if send else backend._group.recv
    return call(memory(tensor), rank, tag, seconds, tensor)


def _report(backend, number, word, seconds):
    rank = backend.rank()
    try:
        _message(backend, True, word, 0, _TAG + number, seconds).wait()
        _message(backend, False, torch.empty_like(word), 0, _TAG + number, seconds).wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. "
            f"Please check rank 0 logs for faulty rank.\n Original exception: \n{error}"
        ) from error


def _awaited(backend, number, word, rank, seconds):
    """
    Returns a function that waits for a rank's message. If the rank has left already, the receive is refused at once,
    and the function raises that error.
    """
    try:
        return _message(backend, False, torch.empty_like(word), rank, _TAG + number, seconds).wait
    except RuntimeError as error:
        refusal = error

    def refused():
        raise refusal

    return refused


def _await_others(backend, number, word, seconds, wait_all_ranks):
    deadline = time.monotonic() + seconds
    others = range(1, backend.size())
    waiting = {rank: _awaited(backend, number, word, rank, seconds) for rank in others} if seconds else {}
    come, missing = [], []
    for rank in others:
        if time.monotonic() >= deadline and not wait_all_ranks:
            raise RuntimeError(
                f"Rank 0 timed out in monitoredBarrier after {_milliseconds(seconds)} ms.\n Ranks that arrived: {_listed(come)}"
            )
        try:
            waiting[rank]()
            come.append(rank)
        except (RuntimeError, KeyError) as error:
            missing.append(rank)
            if not wait_all_ranks:
                raise RuntimeError(
                    f"[Rank 0]: Rank {rank} failed to pass monitoredBarrier in {_milliseconds(seconds)} ms\n Original exception: \n{error}"
                ) from error
    if missing:
        raise RuntimeError(f"[Rank 0]: Ranks {_listed(missing)} failed to pass monitoredBarrier in {_milliseconds(seconds)} ms")
    left = max(deadline - time.monotonic(), 1.0)
    for work in [_message(backend, True, word, rank, _TAG + number, left) for rank in others]:
        work.wait()


def _listed(ranks):
    return ", ".join(map(str, ranks)) or "none"


def _milliseconds(seconds):
    return int(seconds * 1000)
