"""How PyTorch creates groups of the backend.

PyTorch accepts two forms of a backend. Programs call a `ProcessGroup` directly, and its works are ours. A `Backend` can
be one of several in a group, whose class is PyTorch's own. There, calls and works pass through C++, and a work has only
its wait and its future.
"""

import atexit
import functools
import os

import torch
import torch.distributed as dist
from torch._C import _len_torch_dispatch_stack as modes
from torch._C._autograd import _profiler_enabled as profiles
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

from . import _core, hooks
from .backend import CollectivesBackend
from .opaque import opaque, opaque_class
from .tensors import Memoryless
from .work import OwnedWork

# The operations that programs call on a group. PyTorch's other names for some of them call these.
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
# Operations that PyTorch also has in a second form, with roots, ops and timeouts as arguments; and the argument types
# of the first form.
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
# The profiler's names of messages. A work from the dispatcher does not know the sender, or when it is completed.
_MESSAGES = {"send": "c10d::send", "recv": "c10d::recv_", "recv_anysource": "c10d::recv_any_source_"}


def _has_recorder():
    """
    Whether PyTorch's flight recorder gets the collectives. By default it does not, because that makes calls slower: the
    program asks for it by setting a size.
    """
    for variable in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        size = os.environ.get(variable)
        if size:
            return int(size) > 0
    return False


@opaque_class
class CollectivesProcessGroup(dist.ProcessGroup):
    """A group without other backends. Programs call its operations directly; C++ calls the registered backend."""

    def __init__(self, store, rank, size, timeout, connects=True, backend=None):
        super().__init__(store, rank, size)
        custom = dist.ProcessGroup.BackendType.CUSTOM
        self._backend = backend or CollectivesBackend(store, rank, size, timeout, OwnedWork, connects)
        self._set_default_backend(custom)
        self._register_backend(torch.device("cpu"), custom, self._backend)
        self._is_recorded = _has_recorder()

    def split_group(self, ranks, timeout=None, opts=None, group_name=None, group_desc=None, device_types=None):
        """Returns a group of these ranks, in this order, or None on other ranks. All ranks of this group call it."""
        self._backend._splits += 1
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{self._backend._splits}:{'_'.join(map(str, ranks))}"
        store = dist.PrefixStore(f"{name}/", self._backend._store)
        timeout = timeout or (self._backend.options if opts is None else opts)._timeout
        part = type(self)(store, ranks.index(self.rank()), len(ranks), timeout)
        part._set_group_name(name)
        part._set_group_desc(group_desc or "undefined")
        return part

    # `reconfigure` changes the rank and the size. C++ code asks by the second names.

    def rank(self):
        return self._backend.rank()

    def size(self):
        return self._backend.size()

    getRank, getSize = rank, size

    @property
    def supports_reconfigure(self):
        return True

    def get_reconfigure_handle(self):
        return self._backend.get_reconfigure_handle()

    def reconfigure(self, opts):
        return self._backend.reconfigure(opts)

    def _get_sequence_number_for_group(self):
        return self._backend._get_sequence_number_for_group()

    def _set_sequence_number_for_group(self):
        self._backend._set_sequence_number_for_group()

    def getBackendName(self):
        return "collectives"

    def __repr__(self):
        return f"CollectivesProcessGroup(rank {self.rank()} of {self.size()})"


def _are(arguments, kinds):
    return kinds.issuperset(map(type, arguments)) or all(isinstance(argument, tuple(kinds)) for argument in arguments)


def _dispatched(name):
    """
    Returns PyTorch's operation, which goes through its dispatcher. PyTorch calls the group's own operation unless the
    caller is that operation, which it recognises by name.
    """
    pytorchs = getattr(dist.ProcessGroup, name)
    name = getattr(CollectivesBackend, name).__name__  # the new name, if this is an older one

    def dispatched(self, *arguments, **named):
        return pytorchs(self, *arguments, **named)

    dispatched.__code__ = dispatched.__code__.replace(co_name=name)
    return opaque(dispatched)


def _operation(name):
    """
    Returns the backend's operation in both of PyTorch's forms. C++ converts the second form to the first and calls
    that. Modes (such as that of fake tensors) and tensors without memory, which may handle a call themselves, go to the
    dispatcher. So do collectives while PyTorch's profiler runs on this thread, or if its flight recorder is on, because
    both see only calls of the dispatcher.
    """
    first, second, dispatched = getattr(CollectivesBackend, name), getattr(dist.ProcessGroup, name), _dispatched(name)
    of_first, message = _OF_TWO_FORMS.get(name), _MESSAGES.get(name)

    def operation(self, *arguments, **named):
        is_profiled = profiles()
        if modes() or (message is None and (is_profiled or self._is_recorded)):
            return dispatched(self, *arguments, **named)
        try:
            if is_profiled:
                with torch.profiler.record_function(message):
                    return first(self._backend, *arguments, **named)
            if of_first is None or (named.keys() <= {"opts"} and _are(arguments, of_first)):
                return first(self._backend, *arguments, **named)
            return second(self, *arguments, **named)
        except Memoryless:
            return dispatched(self, *arguments, **named)

    return opaque(operation)


for _name in OPERATIONS:
    setattr(CollectivesProcessGroup, _name, _operation(_name))


def _is_for_cpu(options):
    """Whether this group serves CPU tensors. Only the store's prefix shows the device."""
    key = f"collectives/device/{options.group_rank}"
    options.store.set(key, "1")
    return dist.PrefixStore("cpu/", options.store.underlying_store).check([key])


def create(options, _backend_options=None):
    """Creates a group. PyTorch calls this."""
    alone = options.process_group is None or options.process_group.name() == "custom"
    made = CollectivesProcessGroup if alone and _is_for_cpu(options) else CollectivesBackend
    return made(options.store, options.group_rank, options.group_size, options.timeout, connects=not options.enable_reconfigure)


def _serve_shrinks():
    """
    Makes `shrink_group` return our groups. PyTorch would register the backend as Gloo's, and DDP would then read C++
    members that only Gloo's has, and crash.
    """
    module = dist.distributed_c10d
    pytorchs = module._create_shrunk_process_group

    @functools.wraps(pytorchs)
    def create_shrunk(backend, *arguments):
        made = pytorchs(backend, *arguments)
        if not isinstance(backend, CollectivesBackend):
            return made
        backend._work = OwnedWork
        group = CollectivesProcessGroup(made.get_group_store(), backend.rank(), backend.size(), None, backend=backend)
        group._set_group_name(made.group_name)
        group._set_group_desc(made.group_desc)
        configs = module._world.pg_backend_config
        if made in configs:
            configs[group] = configs.pop(made)
        return group

    module._create_shrunk_process_group = create_shrunk


# No thread may be in a callback when the interpreter ends.
atexit.register(_core.stop_telling)
hooks.serve()
_serve_shrinks()
