"""Ranks for tests: processes forked from one that has imported PyTorch. They connect through a file."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

import collectives_torch  # noqa: F401  registers the backend

torch.set_num_threads(1)
SECONDS = 60


class Killed(Exception):
    """A rank died or did not end in time."""


def _rank(program, rank, size, folder, channel, backend, seconds, arguments):
    log = open(os.path.join(folder, f"rank-{rank}"), "w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        timeout = timedelta(seconds=seconds)
        dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=timeout)
        result = program(rank, size, *arguments)
        if dist.is_initialized():
            dist.destroy_process_group()
        channel.send((True, result))
    except BaseException:
        channel.send((False, traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def run(size, program, *arguments, backend="collectives", seconds=SECONDS, lost=()):
    """
    Runs `program(rank, size, *arguments)` on each rank and returns the results in rank order. Ranks in `lost` may die:
    their result is None.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="collectives-torch-") as folder:
        ranks = []
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(program, rank, size, folder, theirs, backend, seconds, arguments))
            process.start()
            theirs.close()
            ranks.append((process, mine))
        deadline = time.monotonic() + 2 * SECONDS
        try:
            return [_result(rank, process, channel, deadline, folder, lost) for rank, (process, channel) in enumerate(ranks)]
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def _result(rank, process, channel, deadline, folder, lost):
    try:
        if not channel.poll(max(deadline - time.monotonic(), 0)):
            raise Killed(f"rank {rank} did not end\n{_log(folder, rank)}")
        well, result = channel.recv()
    except EOFError:
        if rank in lost:
            return None
        process.join()
        raise Killed(f"rank {rank} died ({process.exitcode})\n{_log(folder, rank)}") from None
    if not well:
        raise AssertionError(f"rank {rank}:\n{result}\n{_log(folder, rank)}")
    return result


def _log(folder, rank):
    with open(os.path.join(folder, f"rank-{rank}"), errors="replace") as file:
        return file.read()


def die():
    """Ends this rank as a crash would."""
    os.kill(os.getpid(), signal.SIGKILL)


def heard(call):
    """Returns the type name and the text of the error that a call raises."""
    try:
        call()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return None, ""
