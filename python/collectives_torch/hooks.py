"""DDP's built-in hooks on groups of this backend.

The one that compresses to half precision wants the value of a future to be a list of C++'s. Whatever Python gives to a future is Python's: so there
PyTorch's hook in Python, which computes the same, takes its place.
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
    """Sees to it that DDP takes the hook that can work."""
    pytorchs = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(pytorchs)
    def register(self, comm_hook_type):
        if comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS and _is_ours(self.process_group):
            return self.register_comm_hook(self.process_group, fp16_compress_hook)
        return pytorchs(self, comm_hook_type)

    DistributedDataParallel._register_builtin_comm_hook = register
