"""Calls in compiled functions and models give the same results as with Gloo, in the first run and in later ones."""

import unittest

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BACKENDS = ("collectives", "cpu:collectives,cuda:gloo")


def model():
    torch.manual_seed(3)
    return nn.Linear(4, 2)


def trained(net, rank):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        net(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    return [parameter.tolist() for parameter in net.parameters()]


def trains(rank, size):
    """Trains compiled DDP, DDP of a compiled model, and both, as Lightning's Fabric does."""
    inner = torch.compile(model(), backend="eager")
    nets = (
        torch.compile(DistributedDataParallel(model()), backend="eager"),
        DistributedDataParallel(torch.compile(model(), backend="eager")),
        torch.compile(DistributedDataParallel(inner), backend="eager"),
    )
    return [trained(net, rank) for net in nets]


def broadcasts(x, rank, size):
    y = x * 2
    dist.broadcast(y, size - 1)
    return y + 1


def reduces(x, rank, size):
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def reduces_meanwhile(x, rank, size):
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    z = x + 3
    work.wait()
    return y + z


def passes_on(x, rank, size):
    y = x * 2
    if rank == 0:
        dist.send(y, size - 1)
    elif rank == size - 1:
        dist.recv(y, 0)
    return y + 1


def passes_on_meanwhile(x, rank, size):
    mine, theirs = x * 2, x * 0
    works = [dist.isend(mine, (rank + 1) % size), dist.irecv(theirs, (rank - 1) % size)]
    z = x + 3
    for work in works:
        work.wait()
    return theirs + z


def gathers(x, rank, size):
    parts = [torch.zeros_like(x) for _ in range(size)]
    dist.all_gather(parts, x + 1)
    dist.barrier()
    future = dist.all_reduce(x, async_op=True).get_future()
    future.wait()
    return parts[0] + parts[-1] + x


def coalesces(x, rank, size):
    a, b = x * 2, x * 3
    with dist._coalescing_manager(async_ops=True) as together:
        dist.all_reduce(a)
        dist.all_reduce(b)
    together.wait()
    return a + b


def functionally(x, rank, size):
    total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
    return functional.all_gather_tensor(total, 0, dist.group.WORLD) + 1


FUNCTIONS = (broadcasts, reduces, reduces_meanwhile, passes_on, passes_on_meanwhile, gathers, coalesces, functionally)


def calls(rank, size):
    results = []
    for function in FUNCTIONS:
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="eager")
        results += [(function.__name__, compiled(torch.full((3,), rank + factor), rank, size).tolist()) for factor in (1.0, 2.0, 3.0)]
    return results


class Compiled(unittest.TestCase):
    def is_as_with_gloo(self, program, size):
        expected = run(size, program, backend="gloo")
        for backend in BACKENDS:
            with self.subTest(backend=backend, size=size):
                self.assertEqual(run(size, program, backend=backend), expected)

    def test_compiled_functions_make_calls(self):
        for size in (2, 3):
            self.is_as_with_gloo(calls, size)

    def test_compiled_models_are_trained(self):
        self.is_as_with_gloo(trains, 2)


if __name__ == "__main__":
    unittest.main()
