"""One Python rank of a job whose store is none of Python's: gloo.py env | store PORT RANK WORLD_SIZE | mixed."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

LONG = timedelta(seconds=60)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def collectives(rank, n):
    ones = torch.full((1000,), float(rank + 1))
    dist.all_reduce(ones)
    assert bool((ones == n * (n + 1) / 2).all()), ones
    everybody = [torch.zeros(3, dtype=torch.int64) for _ in range(n)]
    dist.all_gather(everybody, torch.full((3,), rank))
    assert [int(part[0]) for part in everybody] == list(range(n))
    root = torch.full((5,), rank)
    dist.broadcast(root, n - 1)
    assert bool((root == n - 1).all())
    group = dist.new_group(list(range(n - 1)))
    if rank < n - 1:
        count = torch.ones(1)
        dist.all_reduce(count, group=group)
        assert int(count) == n - 1
    dist.monitored_barrier(timeout=LONG)
    dist.barrier()


def mixed():
    """The Python half of rank.rs's mixed job."""
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=LONG)
    store.set(f"mixed/{rank}", f"python {rank}")
    for other in range(n):
        assert store.get(f"mixed/{other}").decode() == f"{'rust' if other % 2 else 'python'} {other}"
    own = dist.PrefixStore("python", store)
    dist.init_process_group("gloo", store=own, rank=rank // 2, world_size=n // 2, timeout=LONG)
    total = torch.tensor([rank])
    dist.all_reduce(total)
    assert int(total) == sum(range(0, n, 2))
    store.add("mixed/done", 1)
    dist.destroy_process_group()
    store.barrier("mixed/end", n, LONG)
    assert store.get("mixed/done") == str(n).encode()


if sys.argv[1] == "mixed":
    mixed()
    print(f"\nrank {os.environ['RANK']} has met the others")
else:
    if sys.argv[1] == "env":
        dist.init_process_group("gloo", timeout=LONG)
    else:
        port, rank, n = map(int, sys.argv[2:])
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LONG)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=LONG)
    collectives(dist.get_rank(), dist.get_world_size())
    print(f"\nrank {dist.get_rank()} of {dist.get_world_size()} is right")
    dist.destroy_process_group()
