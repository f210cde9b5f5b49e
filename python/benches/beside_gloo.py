"""Times calls on this backend and on Gloo in turns, in one job, and prints CSV.

Columns: microseconds (medians of the rounds), Gloo's time divided by this backend's, and bytes over time in GB/s.

torchrun --nproc-per-node 2 python/benches/beside_gloo.py [--rounds N] [--largest BYTES] [--ddp] [--fsdp]
mpiexec -n 2 python python/benches/beside_gloo.py --mpi    with MPI in a third column, through mpi4py

Results are checked. `--ddp` adds a step of DDP with as many parameters as ResNet-50 (25.6 million in 161 tensors).
`--fsdp` adds a step of FSDP2 with 25.2 million parameters in twelve layers. Both compute next to nothing.
"""

import argparse
import os
import statistics
import time

import collectives_torch  # noqa: F401  registers the backend
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


SIZES = (4, 64, 1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24, 1 << 26)


class Parameters(torch.nn.Module):
    """Tensors whose gradients are all ones."""

    def __init__(self):
        super().__init__()
        sizes = [25_557_032 // 161] * 160
        sizes.append(25_557_032 - sum(sizes))
        self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(size)) for size in sizes)

    def forward(self, factor):
        return sum((parameter * factor).sum() for parameter in self.all)


class Group:
    """A PyTorch process group."""

    def __init__(self, group):
        self.group = group

    def barrier(self):
        dist.barrier(self.group)

    def all_reduce(self, whole):
        dist.all_reduce(whole, group=self.group)

    def broadcast(self, whole):
        dist.broadcast(whole, 0, group=self.group)

    def all_gather(self, room, part):
        dist.all_gather_into_tensor(room, part, group=self.group)

    def reduce_scatter(self, part, room):
        dist.reduce_scatter_tensor(part, room, group=self.group)


class Mpi:
    """The same calls with MPI, on the tensors' memory."""

    def __init__(self, mpi):
        self.mpi, self.comm = mpi, mpi.COMM_WORLD

    def barrier(self):
        self.comm.Barrier()

    def all_reduce(self, whole):
        self.comm.Allreduce(self.mpi.IN_PLACE, whole.numpy())

    def broadcast(self, whole):
        self.comm.Bcast(whole.numpy(), 0)

    def all_gather(self, room, part):
        self.comm.Allgather(part.numpy(), room.numpy())

    def reduce_scatter(self, part, room):
        self.comm.Reduce_scatter_block(room.numpy(), part.numpy())


def calls(size, elements):
    """Returns the calls. Each takes a group and returns whether its result is right."""
    whole, part = torch.ones(elements), torch.ones(max(1, elements // size))
    room = torch.empty(part.numel() * size)

    def all_reduce(group):
        group.all_reduce(whole.fill_(1))
        return whole[0] == size

    def broadcast(group):
        group.broadcast(whole.fill_(1 if dist.get_rank() == 0 else 0))
        return whole[-1] == 1

    def all_gather(group):
        group.all_gather(room, part.fill_(1))
        return room[-1] == 1

    def reduce_scatter(group):
        group.reduce_scatter(part, room.fill_(1))
        return part[-1] == size

    return [all_reduce, broadcast, all_gather, reduce_scatter]


def timed(call, group, repeats):
    group.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        right = call(group)
    took = (time.perf_counter() - began) / repeats
    assert bool(right), f"{call.__name__} gave a wrong answer"
    return took * 1e6


def compare(name, bytes_, call, groups, rounds, repeats):
    times = {backend: [] for backend in groups}
    for _ in range(rounds + 1):
        for backend, group in groups.items():
            times[backend].append(timed(call, group, repeats))
    medians = {backend: statistics.median(taken[1:]) for backend, taken in times.items()}
    if dist.get_rank() == 0:
        columns = [f"{median:.1f}" for median in medians.values()]
        ratio = medians["gloo"] / medians["collectives"]
        speeds = [f"{bytes_ / median / 1e3:.3f}" for median in medians.values()]
        print(",".join([name, str(dist.get_world_size()), str(bytes_), *columns, f"{ratio:.2f}", *speeds]), flush=True)


def ddp(groups, rounds):
    models = {backend: DistributedDataParallel(Parameters(), process_group=group.group) for backend, group in groups.items()}
    backend_of = {id(group): backend for backend, group in groups.items()}

    def ddp_step(group):
        model = models[backend_of[id(group)]]
        model.zero_grad(set_to_none=True)
        model(1.0).backward()
        return model.module.all[-1].grad[-1] == 1

    compare("ddp_step", 4 * 25_557_032, ddp_step, groups, rounds, 1)


def fsdp(groups, rounds):
    width, depth = 1448, 12

    def sharded(group):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(depth)))
        mesh = DeviceMesh.from_group(group.group, "cpu", mesh=list(range(dist.get_world_size())), mesh_dim_names=("shard",))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    models = {id(group): sharded(group) for group in groups.values()}
    row = torch.ones(1, width)

    def fsdp_step(group):
        model = models[id(group)]
        model.zero_grad(set_to_none=True)
        model(row).sum().backward()
        return torch.isfinite(model[0].weight.grad.to_local()).all()

    compare("fsdp_step", 4 * width * width * depth, fsdp_step, groups, rounds, 1)
    gradients = [[parameter.grad.full_tensor() for parameter in model.parameters()] for model in models.values()]
    assert all(torch.allclose(ours, theirs, rtol=1e-4) for ours, theirs in zip(*gradients)), "gradients differ"


def start_under_mpi():
    """Passes MPI's rank and world size to PyTorch."""
    from mpi4py import MPI

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29571")
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(MPI.COMM_WORLD.rank), str(MPI.COMM_WORLD.size)
    return Mpi(MPI)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--largest", type=int, default=SIZES[-1])
    parser.add_argument("--mpi", action="store_true")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--fsdp", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mpi = start_under_mpi() if options.mpi else None
    dist.init_process_group("collectives")
    size = dist.get_world_size()
    groups = {"collectives": Group(dist.group.WORLD), "gloo": Group(dist.new_group(backend="gloo"))}
    columns = groups | ({"mpi": mpi} if mpi else {})
    if dist.get_rank() == 0:
        print("call,ranks,bytes," + ",".join(f"{backend}_us" for backend in columns) + ",gloo_to_collectives," + ",".join(f"{backend}_gb_per_s" for backend in columns))
    for bytes_ in [bytes_ for bytes_ in SIZES if bytes_ <= options.largest]:
        for call in calls(size, bytes_ // 4):
            compare(call.__name__, bytes_, call, columns, options.rounds, max(1, min(200, (1 << 22) // bytes_)))
    for step in (ddp, fsdp):
        if getattr(options, step.__name__):
            step(groups, max(3, options.rounds // 2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
