"""A rank of a process group over NCCL, as far as the exchange of its unique id: nccl.py BACKEND env | store PORT RANK WORLD_SIZE.

Without a GPU the stand-ins for CUDA and NCCL (no_device.c) print the id that they made or were given.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

limit = timedelta(seconds=60)
where = {}
if sys.argv[2] == "store":
    port, rank, n = map(int, sys.argv[3:])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    where = {"store": store, "rank": rank, "world_size": n}
dist.init_process_group(sys.argv[1], device_id=torch.device("cuda", 0), timeout=limit, **where)
print("group made", flush=True)
# What the stand-ins made cannot be destroyed in order.
os._exit(0)
