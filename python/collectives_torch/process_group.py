"""How PyTorch makes groups of the backend.

It takes a backend in two shapes. A `ProcessGroup` is called by programs without a detour, and its works are ours. A `Backend` may be one of
several in a group of PyTorch's own; its calls pass through C++, and so do its works, of which only the wait and the future are left there.
"""

import torch
import torch.distributed as dist
from torch._C import _len_torch_dispatch_stack as modes
from torch._C._distributed_c10d import (
    AllToAllOptions,
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from .backend import CollectivesBackend
from .opaque import opaque, opaque_class
from .tensors import Memoryless
from .work import OwnedWork

# What programs call on a group. PyTorch has older names of some, which lead there.
OPERATIONS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "broadcast",
    "all_gather_single",
    "_allgather_base",
    "all_gather_single_coalesced",
    "allgather",
    "allgather_coalesced",
    "gather",
    "gather_single",
    "gather_into_tensor",
    "scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "reduce_scatter_single_coalesced",
    "reduce_scatter",
    "all_to_all_single",
    "alltoall",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
    "monitored_barrier",
)
# Those that PyTorch has in a second form, with roots, ops and timeouts as arguments; and what the first form's arguments are.
_LISTS = ("broadcast", "allreduce", "reduce", "allgather", "gather", "scatter", "reduce_scatter", "barrier")
_OPTIONS = (
    AllToAllOptions,
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
_OF_TWO_FORMS = dict.fromkeys(_LISTS, frozenset((list, *_OPTIONS)))
_OF_TWO_FORMS["all_to_all_single"] = frozenset((torch.Tensor, list, *_OPTIONS))


@opaque_class
class CollectivesProcessGroup(dist.ProcessGroup):
    """For groups that have no other backend: programs call its operations straight away, and C++ by way of the backend that is registered."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(store, rank, size)
        custom = dist.ProcessGroup.BackendType.CUSTOM
        self._backend = CollectivesBackend(store, rank, size, timeout, OwnedWork)
        self._set_default_backend(custom)
        self._register_backend(torch.device("cpu"), custom, self._backend)
        self._splits = 0

    def split_group(self, ranks, timeout=None, opts=None, group_name=None, group_desc=None, device_types=None):
        """A group of some of the ranks, numbered in their order; nothing elsewhere. All ranks of this group ask for it."""
        self._splits += 1
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{self._splits}:{'_'.join(map(str, ranks))}"
        store = dist.PrefixStore(f"{name}/", self.get_group_store())
        timeout = timeout or (self._backend.options if opts is None else opts)._timeout
        part = type(self)(store, ranks.index(self.rank()), len(ranks), timeout)
        part._set_group_name(name)
        part._set_group_desc(group_desc or "undefined")
        return part

    def getBackendName(self):
        return "collectives"

    def __repr__(self):
        return f"CollectivesProcessGroup(rank {self.rank()} of {self.size()})"


def _are(arguments, kinds):
    return kinds.issuperset(map(type, arguments)) or all(isinstance(argument, tuple(kinds)) for argument in arguments)


def _dispatched(name):
    """PyTorch's operation, by way of its dispatcher. It asks the group for its own, unless that has called it: which it tells by the name."""
    pytorchs = getattr(dist.ProcessGroup, name)
    name = getattr(CollectivesBackend, name).__name__  # of an older name, the new one

    def dispatched(self, *arguments, **named):
        return pytorchs(self, *arguments, **named)

    dispatched.__code__ = dispatched.__code__.replace(co_name=name)
    return opaque(dispatched)


def _operation(name):
    """
    The backend's operation, in both forms that PyTorch has of it: of the second C++ makes the first, and calls that. Modes (as that of fake tensors)
    and tensors without memory, which may answer for themselves, are for the dispatcher.
    """
    first, second, dispatched = getattr(CollectivesBackend, name), getattr(dist.ProcessGroup, name), _dispatched(name)
    of_first = _OF_TWO_FORMS.get(name)

    def operation(self, *arguments, **named):
        if modes():
            return dispatched(self, *arguments, **named)
        try:
            if of_first is None or (named.keys() <= {"opts"} and _are(arguments, of_first)):
                return first(self._backend, *arguments, **named)
            return second(self, *arguments, **named)
        except Memoryless:
            return dispatched(self, *arguments, **named)

    return opaque(operation)


for _name in OPERATIONS:
    setattr(CollectivesProcessGroup, _name, _operation(_name))


def _is_for_cpu(options):
    """Whether CPU tensors are to come here: PyTorch tells the device by the prefix of the store alone."""
    key = f"collectives/device/{options.group_rank}"
    options.store.set(key, "1")
    return dist.PrefixStore("cpu/", options.store.underlying_store).check([key])


def create(options, _backend_options=None):
    """What PyTorch calls to make a group."""
    alone = options.process_group is None or options.process_group.name() == "custom"
    made = CollectivesProcessGroup if alone and _is_for_cpu(options) else CollectivesBackend
    return made(options.store, options.group_rank, options.group_size, options.timeout)
