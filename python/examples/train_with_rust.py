"""Trains a linear model on data from a Rust rank (examples/rank_of_torch.rs), which is the last rank of the group.

RANK=0 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python train_with_rust.py    # and RANK=1
RANK=2 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 cargo run --release --example rank_of_torch
"""

import collectives_torch  # noqa: F401  registers the backend
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 40, 16

dist.init_process_group("collectives")
source = dist.get_world_size() - 1
trainers = dist.new_group(list(range(source)), use_local_synchronization=True)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(1, 1), process_group=trainers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for _ in range(STEPS):
    batch = torch.empty(2, BATCH)
    dist.recv(batch, source)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(batch[0].unsqueeze(1)).squeeze(1), batch[1])
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach())
print([round(parameter.item(), 2) for parameter in model.parameters()])
dist.destroy_process_group()
