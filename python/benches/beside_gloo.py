"""Times calls on this backend and on Gloo in turns, in one job, and prints CSV: microseconds, each the median of the rounds, and their ratio.

torchrun --nproc-per-node 2 python/benches/beside_gloo.py [--rounds N] [--largest BYTES] [--ddp]

Answers are checked. `--ddp` adds a step of DDP with as many parameters as ResNet-50 has, 25.6 million in 161 tensors, without computing to speak of.
"""

import argparse
import statistics
import time

import collectives_torch  # noqa: F401  registers the backend
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Parameters(torch.nn.Module):
    """Tensors whose gradients are all ones."""

    def __init__(self):
        super().__init__()
        sizes = [25_557_032 // 161] * 160
        sizes.append(25_557_032 - sum(sizes))
        self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(size)) for size in sizes)

    def forward(self, factor):
        return sum((parameter * factor).sum() for parameter in self.all)


def calls(size, elements):
    """Names, what is called on a group, and whether its answer is right."""
    whole, part = torch.ones(elements), torch.ones(max(1, elements // size))
    room = torch.empty(part.numel() * size)

    def all_reduce(group):
        whole.fill_(1)
        dist.all_reduce(whole, group=group)
        return whole[0] == size

    def broadcast(group):
        dist.broadcast(whole, 0, group=group)
        return True

    def all_gather(group):
        dist.all_gather_into_tensor(room, part.fill_(1), group=group)
        return room[-1] == 1

    def reduce_scatter(group):
        dist.reduce_scatter_tensor(part, room.fill_(1), group=group)
        return part[-1] == size

    return [all_reduce, broadcast, all_gather, reduce_scatter]


def timed(call, group, repeats):
    dist.barrier(group)
    began = time.perf_counter()
    for _ in range(repeats):
        right = call(group)
    took = (time.perf_counter() - began) / repeats
    assert bool(right), f"{call.__name__} gave a wrong answer"
    return took * 1e6


def compare(name, size, bytes_, call, groups, rounds, repeats):
    times = {backend: [] for backend in groups}
    for _ in range(rounds + 1):
        for backend, group in groups.items():
            times[backend].append(timed(call, group, repeats))
    ours, theirs = (statistics.median(times[backend][1:]) for backend in ("collectives", "gloo"))
    if dist.get_rank() == 0:
        print(f"{name},{size},{bytes_},{ours:.1f},{theirs:.1f},{theirs / ours:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--largest", type=int, default=16 << 20)
    parser.add_argument("--ddp", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("collectives")
    size = dist.get_world_size()
    groups = {"collectives": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    if dist.get_rank() == 0:
        print("call,ranks,bytes,collectives_us,gloo_us,ratio")
    bytes_ = 4
    while bytes_ <= options.largest:
        for call in calls(size, bytes_ // 4):
            compare(call.__name__, size, bytes_, call, groups, options.rounds, max(1, min(200, (1 << 22) // bytes_)))
        bytes_ *= 16
    if options.ddp:
        models = {backend: DistributedDataParallel(Parameters(), process_group=group) for backend, group in groups.items()}
        backend_of = {id(group): backend for backend, group in groups.items()}

        def ddp_step(group):
            model = models[backend_of[id(group)]]
            model.zero_grad(set_to_none=True)
            model(1.0).backward()
            return model.module.all[-1].grad[-1] == 1

        compare("ddp_step", size, 4 * 25_557_032, ddp_step, groups, max(3, options.rounds // 2), 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
