"""PyTorch's ways to train on several ranks, compared with one process."""

import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

BATCH, STEPS = 12, 5
# Ranks add the parts of a batch in another order than one process does.
BOUND = 1e-5


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 4))


def batch(step):
    torch.manual_seed(100 + step)
    return torch.randn(BATCH, 8), torch.randn(BATCH, 4)


def train(net, optimizer, part=slice(None)):
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs[part]), targets[part]).backward()
        optimizer.step()


def alone():
    net = model()
    train(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    return [parameter.detach().clone() for parameter in net.parameters()]


def part_of(rank, size):
    return slice(rank * BATCH // size, (rank + 1) * BATCH // size)


def close(parameters, expected, bound=BOUND):
    for parameter, other in zip(parameters, expected, strict=True):
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(whole.detach(), other, rtol=0, atol=bound)


def data_parallel(rank, size, expected):
    for settings in ({}, {"bucket_cap_mb": 0.0005}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}):
        net = DistributedDataParallel(model(), **settings)
        train(net, torch.optim.AdamW(net.parameters(), lr=0.01), part_of(rank, size))
        close(net.parameters(), expected)


def compressed(rank, size, expected):
    """DDP's built-in hooks; half precision has eleven bits."""
    for hook, bound in ((dist.BuiltinCommHookType.FP16_COMPRESS, 2e-2), (dist.BuiltinCommHookType.ALLREDUCE, BOUND)):
        net = DistributedDataParallel(model())
        net._register_builtin_comm_hook(hook)
        train(net, torch.optim.AdamW(net.parameters(), lr=0.01), part_of(rank, size))
        close(net.parameters(), expected, bound)


def sharded_optimizer(rank, size, expected):
    net = DistributedDataParallel(model())
    train(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01), part_of(rank, size))
    close(net.parameters(), expected)


def fully_sharded(rank, size, expected):
    net = model()
    mesh = init_device_mesh("cpu", (size,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, torch.optim.AdamW(net.parameters(), lr=0.01), part_of(rank, size))
    close(net.parameters(), expected)


def tensor_parallel(rank, size, expected):
    mesh = init_device_mesh("cpu", (size,))
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    close(net.parameters(), expected)


def save(rank, size, folder):
    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    checkpoint.save({"model": net.state_dict()}, checkpoint_id=folder)


def load(rank, size, folder):
    net = model()
    with torch.no_grad():
        [parameter.zero_() for parameter in net.parameters()]
    fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    state = {"model": net.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    close(state["model"].values(), [parameter.detach() for parameter in model().parameters()])


class Training(unittest.TestCase):
    def trains_as_one_process(self, program, backend="collectives"):
        expected = alone()
        for size in (2, 3):
            run(size, program, expected, backend=backend)

    def test_data_parallel(self):
        self.trains_as_one_process(data_parallel)

    def test_gradients_are_compressed_by_built_in_hooks(self):
        for backend in ("collectives", "cpu:collectives,cuda:gloo"):
            self.trains_as_one_process(compressed, backend)

    def test_sharded_optimizer(self):
        self.trains_as_one_process(sharded_optimizer)

    def test_fully_sharded(self):
        self.trains_as_one_process(fully_sharded)

    def test_tensor_parallel(self):
        self.trains_as_one_process(tensor_parallel)

    def test_a_checkpoint_of_three_ranks_is_loaded_by_two(self):
        with tempfile.TemporaryDirectory() as folder:
            run(3, save, folder)
            run(2, load, folder)


if __name__ == "__main__":
    unittest.main()
