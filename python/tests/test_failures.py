"""Errors when something fails: their time, their text, and their type, which PyTorch programs catch."""

import gc
import os
import resource
import time
import unittest
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from ranks import die, run

NOBODY = 65_534


def caught(call):
    began = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return None, "", time.monotonic() - began


def one_dies(rank, size):
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        die()
    return caught(lambda: dist.all_reduce(torch.ones(4)))


def one_dies_in_flight(rank, size):
    dist.barrier()
    if rank == 1:
        die()
    work = dist.all_reduce(torch.ones(4), async_op=True)
    return caught(work.wait), caught(work.get_future().wait)


def one_does_not_come(rank, size):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        heard = caught(lambda: dist.barrier(group=group))
    else:
        heard = caught(lambda: dist.group.WORLD.recv([torch.zeros(1)], 0, 5).wait(timedelta(milliseconds=200)))
    dist.barrier()
    return heard


def different_calls(rank, size):
    return caught(lambda: dist.all_reduce(torch.ones(4 + rank)))


def monitored(rank, size):
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    if rank == 1:
        time.sleep(0)  # it does not come
        return None
    return caught(lambda: dist.monitored_barrier(timeout=timedelta(seconds=2)))


def gone_before_a_monitored_barrier(rank, size):
    """Rank 0 knows that rank 1 has left before it begins."""
    if rank == 1:
        return None
    lost = caught(lambda: dist.recv(torch.zeros(1), 1))
    return lost, caught(lambda: dist.monitored_barrier(timeout=timedelta(seconds=30)))


def late_for_a_monitored_barrier(rank, size):
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        return caught(lambda: dist.monitored_barrier(timeout=timedelta(seconds=3)))[0], None
    first = caught(lambda: dist.monitored_barrier(timeout=timedelta(milliseconds=300)))[1]
    dist.send(torch.ones(1), 1)
    return first, caught(lambda: dist.monitored_barrier(timeout=timedelta(seconds=1)))[1]


def takes_longer_than_its_timeout(rank, size):
    """All ranks make the call, but rank 0's timeout is too short for so much data."""
    tensor = torch.ones(1 << 26)
    options = dist.AllreduceOptions()
    options.timeout = timedelta(milliseconds=3 if rank == 0 else 40_000)
    dist.barrier()
    heard = caught(lambda: dist.group.WORLD.allreduce([tensor], options).wait())
    return heard, caught(lambda: dist.barrier())


def cannot_start_a_thread(rank, size):
    """Starts a receive that needs a first thread when the system allows none, then drops its tensor."""
    if rank == 1:
        dist.barrier()
        dist.send(torch.full((1 << 22,), 7, dtype=torch.uint8), 0, tag=1)
        dist.send(torch.ones(1), 0, tag=2)
        return None
    tensor = torch.zeros(1 << 22, dtype=torch.uint8)
    users, limit = os.getresuid(), resource.getrlimit(resource.RLIMIT_NPROC)
    os.setresuid(NOBODY, NOBODY, 0)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, limit[1]))
    heard = caught(lambda: dist.irecv(tensor, 1, tag=1))
    resource.setrlimit(resource.RLIMIT_NPROC, limit)
    os.setresuid(*users)
    del tensor
    gc.collect()
    later = [torch.zeros(1 << 22, dtype=torch.uint8) for _ in range(4)]
    dist.barrier()
    # The refused receive has not begun, so this one gets the message.
    received = torch.zeros(1 << 22, dtype=torch.uint8)
    dist.recv(received, 1, tag=1)
    dist.recv(torch.zeros(1), 1, tag=2)
    return heard[:2], int(received.min()), [int(tensor.max()) for tensor in later]


def leaves_without_a_word(rank, size):
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        work.wait()
    # The process ends without destroying the group.
    print(tensor)
    os._exit(0)


def forks(rank, size):
    dist.all_reduce(torch.ones(2))
    child = os.fork()
    if child == 0:
        heard = caught(lambda: dist.all_reduce(torch.ones(2)))
        os._exit(0 if "fork" in heard[1] else 1)
    _, status = os.waitpid(child, 0)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return os.waitstatus_to_exitcode(status), tensor[0].item()


class Failures(unittest.TestCase):
    def test_a_dead_rank_is_named_to_the_others(self):
        for heard in [outcome for outcome in run(3, one_dies, lost=[1]) if outcome]:
            kind, words, seconds = heard
            self.assertEqual(kind, "DistNetworkError")
            self.assertIn("rank 1", words)
            self.assertLess(seconds, 20)

    def test_a_work_and_its_future_tell_of_a_dead_rank(self):
        for outcome in [outcome for outcome in run(2, one_dies_in_flight, lost=[1]) if outcome]:
            for kind, words, _ in outcome:
                self.assertIsNotNone(kind)
                self.assertIn("rank 1", words)

    def test_who_does_not_come_is_named_after_the_timeout(self):
        waited, gave_up = run(2, one_does_not_come)
        self.assertEqual(waited[0], "DistBackendError")
        self.assertIn("rank 1", waited[1])
        self.assertIn("Timed out", gave_up[1])

    def test_calls_that_differ_are_told_to_all(self):
        for kind, words, _ in run(2, different_calls):
            self.assertEqual(kind, "DistBackendError")
            self.assertTrue("count 4" in words and "count 5" in words, words)

    def test_a_monitored_barrier_names_who_is_missing(self):
        heard = run(3, monitored)
        self.assertIn("Rank 1 failed to pass monitoredBarrier", heard[0][1])
        self.assertIn("Rank 2 successfully reached monitoredBarrier", heard[2][1])

    def test_a_monitored_barrier_names_a_rank_that_had_left_before(self):
        (lost, barrier), _ = run(2, gone_before_a_monitored_barrier)
        self.assertIn("lost rank 1", lost[1])
        self.assertIn("Rank 1 failed to pass monitoredBarrier", barrier[1])

    def test_a_monitored_barrier_takes_no_word_of_an_earlier_one(self):
        outcomes = run(2, late_for_a_monitored_barrier)
        self.assertIn("Rank 1 failed", outcomes[0][0])
        self.assertIn("Rank 1 failed", outcomes[0][1])
        self.assertIsNotNone(outcomes[1][0])

    def test_a_time_that_is_too_short_blames_nobody_who_came(self):
        # In shared memory a rank may find all its data whenever it checks. Over TCP it waits, and checks its deadline.
        with mock.patch.dict(os.environ, COLLECTIVES_TRANSPORT="tcp"):
            heard = run(2, takes_longer_than_its_timeout)
        for rank, outcomes in enumerate(heard):
            for kind, words, _ in outcomes:
                self.assertEqual(kind, "DistBackendError", words)
                self.assertNotIn(f"missing: rank {rank}", words)
                self.assertNotIn("missing: none", words)

    @unittest.skipIf(os.getuid() != 0, "needs root, whom no limit holds until it is somebody else")
    def test_memory_of_a_call_that_could_not_be_started_is_left_alone(self):
        (_, received, later), _ = run(2, cannot_start_a_thread)
        self.assertEqual((received, later), (7, [0, 0, 0, 0]))

    def test_leaving_without_destroying_the_group_hangs_nobody(self):
        self.assertEqual(run(2, leaves_without_a_word, lost=[0, 1]), [None, None])

    def test_a_forked_child_is_refused_and_its_parent_goes_on(self):
        self.assertEqual(run(2, forks), [(0, 2.0), (0, 2.0)])


if __name__ == "__main__":
    unittest.main()
