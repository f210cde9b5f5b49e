"""PyTorch's sequence number of a group, and its flight recorder."""

import os
import pickle
import threading
import time
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from ranks import heard, run
from torch._C._distributed_c10d import _dump_fr_trace


def numbered(rank, size):
    """Returns the sequence number of the backend after each of these calls."""
    world, seen = dist.group.WORLD, []
    backend = world._get_backend(torch.device("cpu"))

    def count():
        seen.append(backend._get_sequence_number_for_group())

    count()
    ones, parts = torch.ones(2), [torch.ones(2) for _ in range(size)]
    options = dist.AllreduceCoalescedOptions()
    calls = (
        lambda: dist.all_reduce(ones),
        lambda: dist.all_reduce(ones, async_op=True).wait(),
        lambda: dist.all_reduce(torch.ones(2).to_sparse()),
        lambda: world.allreduce_coalesced([torch.ones(2), torch.ones(3)], options).wait(),
        lambda: dist.broadcast(ones, 0),
        lambda: dist.reduce(ones, 0),
        lambda: dist.all_gather(parts, ones),
        lambda: dist.all_gather_into_tensor(torch.ones(2 * size), ones),
        lambda: dist.gather(ones, parts if rank == 0 else None),
        lambda: dist.scatter(ones, parts if rank == 0 else None),
        lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size)),
        dist.barrier,
    )
    for call in calls:
        call()
        count()
    return seen


def messages(rank, size):
    """Messages are not counted, because only two ranks take part."""
    for tag in range(2):
        dist.send(torch.ones(1), 1, tag=tag) if rank == 0 else dist.recv(torch.ones(1), 0, tag=tag)
    return dist.group.WORLD._get_sequence_number_for_group()


def recorded(rank, size):
    for _ in range(3):
        dist.all_reduce(torch.ones(2, 3))
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    dist.barrier()
    entries = pickle.loads(_dump_fr_trace(backend="collectives"))["entries"]
    world = dist.group.WORLD._get_sequence_number_for_group()
    return world, [(entry["profiling_name"], entry["input_sizes"], entry["collective_seq_id"], entry["retired"]) for entry in entries]


def stuck(rank, size):
    """Rank 1 does not come to a call. Rank 0's recorder shows which call waits."""
    dist.barrier()
    if rank == 1:
        dist.recv(torch.ones(1), 0)
        return None
    waits = threading.Thread(target=lambda: heard(lambda: dist.all_reduce(torch.ones(5))))
    waits.start()
    deadline, waiting = time.monotonic() + 30, []
    while not waiting and time.monotonic() < deadline:
        entries = pickle.loads(_dump_fr_trace(backend="collectives"))["entries"]
        waiting = [(entry["profiling_name"], entry["input_sizes"]) for entry in entries if not entry["retired"]]
    dist.send(torch.ones(1), 1)
    dist.group.WORLD.abort()
    waits.join()
    return waiting


class Recorded(unittest.TestCase):
    def test_sequence_numbers_are_as_with_gloo(self):
        for backend in ("collectives", "cpu:collectives,cuda:gloo"):
            for size in (2, 3):
                with self.subTest(backend=backend, size=size):
                    outcomes = run(size, numbered, backend=backend)
                    self.assertEqual(outcomes, run(size, numbered, backend="gloo"))
                    self.assertEqual(outcomes[0], list(range(13)))

    def test_messages_have_no_sequence_number(self):
        self.assertEqual(run(2, messages), [0, 0])

    def test_the_recorder_has_the_calls_when_it_is_asked_for(self):
        expected = [("collectives:all_reduce", [[2, 3]])] * 3 + [("collectives:all_reduce", [[4]]), ("collectives:barrier", [])]
        for variable in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
            with mock.patch.dict(os.environ, {variable: "100"}):
                for world, entries in run(2, recorded):
                    self.assertEqual(world, 5)
                    self.assertEqual([entry[:2] for entry in entries], expected)
                    self.assertEqual([entry[2] for entry in entries], [1, 2, 3, 4, 5])
                    self.assertTrue(all(entry[3] for entry in entries))

    def test_the_recorder_shows_a_call_that_waits(self):
        with mock.patch.dict(os.environ, TORCH_FR_BUFFER_SIZE="100"):
            self.assertEqual(run(2, stuck)[0], [("collectives:all_reduce", [[5]])])

    def test_the_recorder_is_off_otherwise(self):
        with mock.patch.dict(os.environ, TORCH_FR_BUFFER_SIZE="0"):
            self.assertEqual([entries for _, entries in run(2, recorded)], [[], []])
        with mock.patch.dict(os.environ):
            os.environ.pop("TORCH_FR_BUFFER_SIZE", None)
            os.environ.pop("TORCH_NCCL_TRACE_BUFFER_SIZE", None)
            self.assertEqual([entries for _, entries in run(2, recorded)], [[], []])


if __name__ == "__main__":
    unittest.main()
