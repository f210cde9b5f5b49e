"""DDP's built-in hooks on groups of this backend.

The hook that compresses to half precision needs a C++ list as the value of a future. Python can set only Python values.
So PyTorch's hook in Python, which computes the same, replaces it.
"""

import functools

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from .backend import CollectivesBackend


def _is_ours(group):
    try:
        return isinstance(group._get_backend(torch.device("cpu")), CollectivesBackend)
    except RuntimeError:  # no backend for CPU tensors
        return False


def serve():
    """Makes DDP use the hook that works with this backend."""
    pytorchs = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(pytorchs)
    def register(self, comm_hook_type):
        if comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS and _is_ours(self.process_group):
            return self.register_comm_hook(self.process_group, fp16_compress_hook)
        return pytorchs(self, comm_hook_type)

    DistributedDataParallel._register_builtin_comm_hook = register
