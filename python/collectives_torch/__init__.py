"""The backend "collectives" for torch.distributed. Importing this package registers it.

>>> import collectives_torch, torch.distributed as dist
>>> dist.init_process_group("collectives")  # doctest: +SKIP
"""

import atexit

import torch.distributed as dist

from . import _core, hooks
from .backend import CollectivesBackend
from .process_group import CollectivesProcessGroup, create

__all__ = ["CollectivesBackend", "CollectivesProcessGroup"]

# No thread may be in a callback when the interpreter ends.
atexit.register(_core.stop_telling)
hooks.serve()
dist.Backend.register_backend("collectives", create, extended_api=True, devices=["cpu"])
