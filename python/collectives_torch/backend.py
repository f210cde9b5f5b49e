"""The backend: every operation of PyTorch's process groups on CPU tensors."""

import os
import socket
import threading

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllToAllOptions,
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    Backend,
    BarrierOptions,
    ReduceScatterOptions,
)

from . import _core, interrupts, membership, sparse
from .monitored_barrier import monitored_barrier
from .opaque import opaque_class
from .tensors import check, check_target, foldable, memory, overlap, reduction, single
from .work import Call, EndedWork, HeldWork, joined

# PyTorch's tags are below this.
_TAGS = 1 << 32


def _address():
    """
    Returns the address from which this host reaches the master. Other hosts reach this host there. None if there is no
    master address, if it cannot be resolved, or if COLLECTIVES_SOCKET_IFNAME selects the address.
    """
    master = os.environ.get("MASTER_ADDR")
    if not master or "COLLECTIVES_SOCKET_IFNAME" in os.environ:
        return None
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(master, int(os.environ.get("MASTER_PORT", "1")), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return probe.getsockname()[0].split("%")[0]
    except (OSError, ValueError):
        return None


def _of_this_attempt(store):
    """
    Returns the part of a store for this attempt. Ranks that torchrun restarts may find the store of the failed ranks,
    with all its keys.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store if attempt == "0" else dist.PrefixStore(f"attempt_{attempt}/", store)


@opaque_class
class CollectivesBackend(Backend):
    """The ranks of one PyTorch group, connected by this crate."""

    def __init__(self, store, rank, size, timeout, work=HeldWork, connects=True):
        super().__init__(rank, size)
        self._work = work  # the class of the works that calls return
        self._options = Backend.Options("collectives", timeout=timeout)
        self._seconds = timeout.total_seconds()
        self._windows = threading.local()  # coalescing is per thread
        self._first_store, self._token = store, membership.new_token()
        interrupts.end_blocked_calls()
        self._begin(store, rank, size)
        self._group = self._connected(self._seconds) if connects else membership.Unconnected()

    def _begin(self, store, rank, size):
        """Begins as a group of these ranks, which has made no calls."""
        self._rank, self._size, self._store = rank, size, store
        self._sequence = self._splits = self._shrinks = self._barriers = 0

    def _connected(self, seconds):
        """Connects to the other ranks."""
        # Groups of one rank may share a name, because PyTorch counts names on each rank. So they use no common store.
        meeting = _of_this_attempt(self._store) if self._size > 1 else dist.HashStore()
        return _core.Group(meeting, self._rank, self._size, seconds, _address())

    # Properties.

    @property
    def options(self):
        return self._options

    @property
    def supports_splitting(self):
        return True

    @property
    def supports_coalescing(self):
        return True

    @property
    def supports_shrinking(self):
        return True

    @property
    def supports_reconfigure(self):
        return True

    def getBackendName(self):
        return "collectives"

    name = getBackendName

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def __repr__(self):
        return f"{type(self).__name__}(rank {self._rank} of {self._size})"

    # Timeouts.

    def _set_default_timeout(self, timeout):
        self._options._timeout = timeout
        self._seconds = timeout.total_seconds()

    set_timeout = _set_default_timeout

    def _limit(self, opts):
        seconds = opts.timeout.total_seconds()  # negative if it is not set
        return seconds if seconds > 0 else self._seconds

    # Making calls.

    def _call(self, method, arguments, opts, result, owner, finish=None):
        """Makes a call: a blocking call if the caller waits for it anyway, otherwise a background call."""
        self._sequence += 1
        if getattr(opts, "asyncOp", True) or self._window() is not None:
            started = method(*arguments, self._limit(opts), owner)
            return self._add(self._work(Call(started, finish), result))
        method(*arguments, self._limit(opts), None)
        if finish is not None:
            with torch.inference_mode():  # tensors made in this mode can be changed only in it
                finish()
        return EndedWork(result)

    def _add(self, work):
        window = self._window()
        if window is not None:
            window.append(work)
        return work

    def _window(self):
        return getattr(self._windows, "works", None)

    def start_coalescing(self):
        self._windows.works = []

    def end_coalescing(self):
        works, self._windows.works = self._window() or [], None
        return joined(works, None, self._work)

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    @staticmethod
    def _place(tensor, what):
        """Returns contiguous memory for a tensor that a call changes, and a function (or None) that copies it back."""
        check(tensor, what)
        own = tensor.detach()  # keeps the memory if the program replaces the tensor's data
        if own.is_contiguous() and not own.is_neg() and not own.is_conj():
            return own, None
        check_target(own, what)
        copy = own.resolve_conj().resolve_neg().contiguous()
        if copy.data_ptr() == own.data_ptr():
            copy = copy.clone()
        return copy, lambda: own.copy_(copy)

    @staticmethod
    def _input(tensor, what):
        check(tensor, what)
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    # Collectives on one tensor.

    def allreduce(self, tensors, opts=None):
        opts = opts or AllreduceOptions()
        if len(tensors) == 1 and tensors[0].layout == torch.sparse_coo:
            if self._window() is not None:
                raise RuntimeError("ProcessGroup::allreduce: sparse tensors cannot be coalesced with other calls")
            first = self._sequence + 1
            work = sparse.all_reduce(self, tensors[0], opts)
            self._sequence = first  # PyTorch counts one call
            return work
        return self._call(*self._all_reduce(tensors, opts))

    def _all_reduce(self, tensors, opts):
        tensor = single(tensors, "ProcessGroup::allreduce")
        op = reduction(opts.reduceOp, tensor, "ProcessGroup::allreduce")
        place, finish = self._place(tensor, "ProcessGroup::allreduce")
        used = foldable(place, "ProcessGroup::allreduce")
        return self._group.all_reduce, (memory(used), op), opts, tensors, used, finish

    def allreduce_coalesced(self, tensors, opts=None):
        opts = opts or AllreduceCoalescedOptions()
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise ValueError("ProcessGroup::allreduce_coalesced: tensors must all have the same type")
        if any(tensor.layout != torch.strided for tensor in tensors):
            raise ValueError("ProcessGroup::allreduce_coalesced: tensors must be dense")
        return self._call_all([self._all_reduce([tensor], opts) for tensor in tensors], tensors)

    def reduce(self, tensors, opts):
        what = "ProcessGroup::reduce"
        tensor = single(tensors, what)
        op = reduction(opts.reduceOp, tensor, what)
        place, finish = self._place(tensor, what) if opts.rootRank == self._rank else (self._input(tensor, what), None)
        used = foldable(place, what)
        return self._call(self._group.reduce, (memory(used), self._root(opts, what), op), opts, tensors, used, finish)

    def broadcast(self, tensors, opts):
        what = "ProcessGroup::broadcast"
        tensor = single(tensors, what)
        place, finish = (self._input(tensor, what), None) if opts.rootRank == self._rank else self._place(tensor, what)
        return self._call(self._group.broadcast, (memory(place), self._root(opts, what)), opts, tensors, place, finish)

    def _root(self, opts, what):
        if not 0 <= opts.rootRank < self._size:
            raise ValueError(f"{what}: invalid root rank: {opts.rootRank}")
        return opts.rootRank

    def _call_all(self, calls, result):
        """Makes several calls as one. All have been checked before, because a call that has begun cannot be undone."""
        first = self._sequence + 1
        works = [self._call(*call) for call in calls]
        self._sequence = first  # PyTorch counts one call
        return works[0] if len(works) == 1 else joined(works, result, self._work)

    # Gathering.

    def all_gather_single(self, output, input, opts=None):
        return self._call(*self._all_gather_single(output, input, opts))

    def _all_gather_single(self, output, input, opts):
        what = "ProcessGroup::all_gather_single"
        opts = opts or AllgatherOptions()
        check(input, what)
        if input.dtype != output.dtype:
            raise ValueError(f"{what}: output tensor must have the same type as input tensor")
        if input.numel() * self._size != output.numel():
            raise ValueError(f"{what}: output tensor size must be equal to world_size times input tensor size")
        place, finish = self._place(output, what)
        source = self._input(input, what)
        own = place.data_ptr() + self._rank * source.nbytes
        if overlap(source, place):
            source = None if source.data_ptr() == own else source.clone()
        arguments = (None if source is None else memory(source), memory(place))
        return self._group.all_gather, arguments, opts, [output], (source, place), finish

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        calls = [self._all_gather_single(output, input, opts) for output, input in zip(outputs, inputs, strict=True)]
        return self._call_all(calls, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs, inputs, opts=None):
        return self._call(*self._all_gather(outputs, inputs, opts))

    def _all_gather(self, outputs, inputs, opts):
        what = "ProcessGroup::allgather"
        opts = opts or AllgatherOptions()
        if len(inputs) != 1 or len(outputs) != 1:
            raise ValueError(f"{what}: requires a single-element input and output tensor list")
        (outputs,), input = outputs, single(inputs, what)
        self._alike(outputs, input, what, check_target)
        source = self._input(input, what)
        gathered = source.new_empty((self._size, source.numel()))
        arguments = (memory(source), memory(gathered))
        return self._group.all_gather, arguments, opts, outputs, (source, gathered), lambda: _spread(gathered, outputs)

    def allgather_coalesced(self, outputs, inputs, opts=None):
        calls = []
        for at, input in enumerate(inputs):
            calls.append(self._all_gather([[outputs[rank][at] for rank in range(self._size)]], [input], opts))
        return self._call_all(calls, outputs)

    def gather(self, outputs, inputs, opts):
        what = "ProcessGroup::gather"
        root, input = self._root(opts, what), single(inputs, what)
        source, gathered, finish = self._input(input, what), None, None
        if root == self._rank:
            if len(outputs) != 1:
                raise ValueError(f"{what}: requires a single-element output list containing a list with {self._size} tensors")
            (outputs,) = outputs
            self._alike(outputs, input, what, check_target)
            gathered = source.new_empty((self._size, source.numel()))
            finish = lambda: _spread(gathered, outputs)
        elif outputs:
            raise ValueError(f"{what}: requires empty output on non-root")
        arguments = (memory(source), None if gathered is None else memory(gathered), root)
        return self._call(self._group.gather, arguments, opts, outputs, (source, gathered), finish)

    def gather_single(self, output, input, opts):
        what = "ProcessGroup::gather_single"
        root, source, place, finish = self._root(opts, what), self._input(input, what), None, None
        if root == self._rank:
            if input.dtype != output.dtype:
                raise ValueError(f"{what}: output tensor must have the same type as input tensor")
            if input.numel() * self._size != output.numel():
                raise ValueError(f"{what}: output tensor size must be equal to world_size times input tensor size")
            place, finish = self._place(output, what)
            if overlap(source, place):
                source = source.clone()
        arguments = (memory(source), None if place is None else memory(place), root)
        return self._call(self._group.gather, arguments, opts, [output], (source, place), finish)

    gather_into_tensor = gather_single

    def scatter(self, outputs, inputs, opts):
        what = "ProcessGroup::scatter"
        root, output = self._root(opts, what), single(outputs, what)
        place, finish = self._place(output, what)
        source = None
        if root == self._rank:
            if len(inputs) != 1:
                raise ValueError(f"{what}: requires a single-element input list containing a list with {self._size} tensors")
            self._alike(inputs[0], output, what)
            source = _flat(inputs[0])
        elif inputs:
            raise ValueError(f"{what}: requires empty input on non-root")
        arguments = (None if source is None else memory(source), memory(place), root)
        return self._call(self._group.scatter, arguments, opts, outputs, (source, place), finish)

    def _of_one_type(self, tensors, like, what, check=check):
        if len(tensors) != self._size:
            raise ValueError(f"{what}: Incorrect list size {len(tensors)}, which should be {self._size}, same as the group's size")
        for tensor in tensors:
            check(tensor, what)
            if tensor.dtype != like.dtype:
                raise ValueError(f"{what}: invalid tensor type: {tensor.dtype} where {like.dtype} is expected")

    def _alike(self, tensors, like, what, check=check):
        self._of_one_type(tensors, like, what, check)
        for tensor in tensors:
            if tensor.numel() != like.numel():
                raise ValueError(f"{what}: invalid tensor size: {tuple(tensor.shape)} where {tuple(like.shape)} is expected")

    # Reduce-scatters.

    def reduce_scatter_single(self, output, input, opts=None):
        return self._call(*self._reduce_scatter_single(output, input, opts))

    def _reduce_scatter_single(self, output, input, opts):
        what = "ProcessGroup::reduce_scatter_single"
        opts = opts or ReduceScatterOptions()
        check(output, what)
        if input.dtype != output.dtype:
            raise ValueError(f"{what}: input tensor must be the same type as the output tensor")
        if output.numel() * self._size != input.numel():
            raise ValueError(f"{what}: input tensor must be the same size as output size times world size")
        op = reduction(opts.reduceOp, input, what)
        source = self._input(input, what)
        place, finish = self._place(output, what)
        if overlap(source, place):
            source = source.clone()
        used, into = foldable(source, what), foldable(place, what)
        return self._group.reduce_scatter, (memory(used), memory(into), None, op), opts, [output], (used, into), finish

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        calls = [self._reduce_scatter_single(output, input, opts) for output, input in zip(outputs, inputs, strict=True)]
        return self._call_all(calls, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs, inputs, opts=None):
        """Parts may have different lengths, but each has the same length on all ranks."""
        what = "ProcessGroup::reduce_scatter"
        opts = opts or ReduceScatterOptions()
        if len(inputs) != 1:
            raise ValueError(f"{what}: requires a single-element input list")
        (inputs,), output = inputs, single(outputs, what)
        self._of_one_type(inputs, output, what)
        if inputs[self._rank].shape != output.shape:
            raise ValueError(f"{what}: invalid tensor size: {tuple(inputs[self._rank].shape)} where {tuple(output.shape)} is expected")
        op = reduction(opts.reduceOp, output, what)
        place, finish = self._place(output, what)
        used, into = foldable(_flat(inputs), what), foldable(place, what)
        factor = 2 if output.is_complex() else 1
        counts = [factor * tensor.numel() for tensor in inputs]
        counts = counts if len(set(counts)) > 1 else None
        return self._call(self._group.reduce_scatter, (memory(used), memory(into), counts, op), opts, [output], (used, into), finish)

    # All-to-alls.

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=None):
        what = "ProcessGroup::all_to_all_single"
        opts = opts or AllToAllOptions()
        if input.dtype != output.dtype:
            raise ValueError(f"{what}: tensors are not equal in data type")
        sent, received = self._counts(input, input_splits, what), self._counts(output, output_splits, what)
        source = self._input(input, what)
        place, finish = self._place(output, what)
        if overlap(source, place):
            source = source.clone()
        factor = 1 if memory(source)[2] != 10 else source.element_size()
        arguments = ((memory(source), [factor * n for n in sent]), (memory(place), [factor * n for n in received]))
        return self._call(self._group.all_to_all, arguments, opts, [output], (source, place), finish)

    alltoall_base = all_to_all_single

    def _counts(self, tensor, splits, what):
        """Returns the number of elements for each rank: those sent to it or received from it."""
        rows = tensor.size(0) if tensor.dim() else 1
        if not splits:
            if rows % self._size:
                raise ValueError(f"{what}: Tensor's dim 0 does not divide equally across group size")
            return [tensor.numel() // self._size] * self._size
        if len(splits) != self._size:
            raise ValueError(f"{what}: Number of tensor splits not equal to group size")
        if min(splits) < 0:
            raise ValueError(f"{what}: split sizes must not be negative: {list(splits)}")
        if sum(splits) != rows:
            raise ValueError(f"{what}: Split sizes doesn't match total dim 0 size")
        row = tensor.numel() // rows if rows else 0
        return [row * split for split in splits]

    def alltoall(self, outputs, inputs, opts=None):
        what = "ProcessGroup::alltoall"
        opts = opts or AllToAllOptions()
        self._of_one_type(inputs, inputs[0] if inputs else None, what)
        self._of_one_type(outputs, inputs[0], what, check_target)
        source = _flat(inputs)
        place = source.new_empty(sum(tensor.numel() for tensor in outputs))
        factor = 1 if memory(source)[2] != 10 else source.element_size()
        counts = [[factor * tensor.numel() for tensor in tensors] for tensors in (inputs, outputs)]

        def finish():
            for tensor, part in zip(outputs, place.split([tensor.numel() for tensor in outputs])):
                tensor.detach().copy_(part.view(tensor.shape))

        arguments = ((memory(source), counts[0]), (memory(place), counts[1]))
        return self._call(self._group.all_to_all, arguments, opts, outputs, (source, place), finish)

    # Messages.

    def send(self, tensors, rank, tag=0):
        what = "ProcessGroup::send"
        tensor = self._input(single(tensors, what), what)
        self._peer(rank, what)
        started = self._group.send(memory(tensor), rank, self._tag(tag, what), self._seconds, tensor)
        return self._add(self._work(Call(started, None), tensors))

    def recv(self, tensors, rank, tag=0):
        self._peer(rank, "ProcessGroup::recv")
        return self._receive(tensors, rank, tag, "ProcessGroup::recv")

    def recv_anysource(self, tensors, tag=0):
        return self._receive(tensors, None, tag, "ProcessGroup::recvAnysource")

    def _receive(self, tensors, rank, tag, what):
        place, finish = self._place(single(tensors, what), what)
        started = self._group.recv(memory(place), rank, self._tag(tag, what), self._seconds, place)
        return self._add(self._work(Call(started, finish), tensors))

    def _peer(self, rank, what):
        if not 0 <= rank < self._size:
            raise ValueError(f"{what}: Invalid rank {rank} in a group of {self._size}")

    def _tag(self, tag, what):
        if not 0 <= tag < _TAGS:
            raise ValueError(f"{what}: Tag {tag} must be between 0 and {_TAGS - 1}")
        return tag

    # Barriers, splits and shutdown.

    def barrier(self, opts=None):
        opts = opts or BarrierOptions()
        return self._call(self._group.barrier, (), opts, [], ())

    def monitored_barrier(self, timeout, wait_all_ranks=False):
        self._barriers += 1
        monitored_barrier(self, self._barriers, timeout, wait_all_ranks)

    def split(self, store, ranks, opts):
        """Called by PyTorch's C++ code if a group has several backends. That code needs a backend on every rank."""
        self._splits += 1
        if self._rank not in ranks:
            raise RuntimeError(f"split_group: rank {self._rank} is in none of the new groups; a group with several backends can only be split if every rank is in one")
        timeout = self._options._timeout if opts is None else opts._timeout
        name = f"split/{self._splits}/{'_'.join(map(str, ranks))}"
        return type(self)(dist.PrefixStore(name, store), ranks.index(self._rank), len(ranks), timeout)

    def perform_nocolor_split(self, _device):
        """A rank that is in no part has nothing to do."""

    def abort(self):
        self._group.abort()

    def shutdown(self):
        self._group.shut_down()

    # Other ranks.

    def shrink(self, ranks_to_exclude, shrink_flags=0, opts_override=None):
        """Returns a backend of the other ranks, which call this."""
        return membership.shrink(self, ranks_to_exclude, shrink_flags, opts_override)

    def get_reconfigure_handle(self):
        return membership.handle(self)

    def reconfigure(self, opts):
        """Makes this a group of the ranks with these handles. All of them call it, with a number that is used once."""
        rank, size = membership.place(self, opts.handles)
        seconds = self._seconds if opts.timeout is None else opts.timeout.total_seconds()
        ended, self._group = self._group, membership.Unconnected()
        ended.abort()
        self._begin(dist.PrefixStore(f"reconfigure/{opts.uuid}/", self._first_store), rank, size)
        self._group = self._connected(seconds)
        return EndedWork([])

    # The number of collectives.

    def _set_sequence_number_for_group(self):
        """Does nothing, because every rank counts from 0."""

    def _get_sequence_number_for_group(self):
        return self._sequence


def _spread(gathered, outputs):
    for part, output in zip(gathered, outputs):
        output.detach().copy_(part.view(output.shape))


def _flat(tensors):
    """Returns the elements of all tensors, one after another."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
