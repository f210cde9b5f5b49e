"""What tools of PyTorch see of calls."""

import unittest

import torch
import torch.distributed as dist
from ranks import run
from torch.distributed.tensor.debug import CommDebugMode

BACKENDS = ("collectives", "cpu:collectives,cuda:gloo")


def calls(rank, size):
    tensor = torch.full((4,), rank + 1.0)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    dist.broadcast(tensor, 1)
    parts = [torch.empty(4) for _ in range(size)]
    dist.all_gather(parts, tensor)
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
    dist.barrier()
    return tensor.tolist(), [part.tolist() for part in parts]


def profiled(rank, size):
    expected = calls(rank, size)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert calls(rank, size) == expected
    assert calls(rank, size) == expected
    return sorted(event.name for event in profile.events() if event.name.startswith("c10d::"))


def counted(rank, size):
    with CommDebugMode() as mode:
        calls(rank, size)
    return sorted((str(call), count) for call, count in mode.get_comm_counts().items())


class Observed(unittest.TestCase):
    def is_as_with_gloo(self, program):
        for size in (2, 3):
            expected = run(size, program, backend="gloo")
            self.assertTrue(all(expected))
            for backend in BACKENDS:
                with self.subTest(backend=backend, size=size):
                    self.assertEqual(run(size, program, backend=backend), expected)

    def test_the_profiler_sees_the_same_calls_as_with_gloo(self):
        self.is_as_with_gloo(profiled)

    def test_the_mode_that_counts_calls_counts_the_same_as_with_gloo(self):
        self.is_as_with_gloo(counted)


if __name__ == "__main__":
    unittest.main()
