"""The backend "collectives" of torch.distributed: importing this registers it.

>>> import collectives_torch, torch.distributed as dist
>>> dist.init_process_group("collectives")  # doctest: +SKIP
"""

import torch.distributed as dist

from .backend import CollectivesBackend, CollectivesProcessGroup, create

__all__ = ["CollectivesBackend", "CollectivesProcessGroup"]

dist.Backend.register_backend("collectives", create, extended_api=True, devices=["cpu"])
