"""How the ranks of a group change: `shrink_group` and `reconfigure`. Both connect the new ranks through the old store."""

import os

import torch.distributed as dist

# PyTorch's flag that ends the calls of the old group first.
_ABORT = 1


class Unconnected:
    """Stands for the connections of a group that has none yet. Every call fails."""

    def __getattr__(self, name):
        raise dist.DistBackendError(
            f"{name}: the group was made with enable_reconfigure=True and has no ranks yet; call reconfigure on all ranks first"
        )

    def abort(self):
        """Does nothing, because no call runs."""

    shut_down = abort


def shrink(backend, excluded, flags, options):
    """
    Returns a backend of the other ranks. Only those call this. Excluded ranks may be dead or alive. All other ranks must
    come before the timeout, because PyTorch has already decided which ranks remain.
    """
    rank, size = backend.rank(), backend.size()
    remaining = [other for other in range(size) if other not in set(excluded)]
    if rank not in remaining or len(remaining) + len(excluded) != size:
        raise ValueError(f"shrink: ranks {list(excluded)} must be different ranks of a group of {size}, and not contain this rank {rank}")
    if flags not in (dist.distributed_c10d.SHRINK_DEFAULT, _ABORT):
        raise ValueError(f"shrink: unknown flags {flags}; pass SHRINK_DEFAULT or SHRINK_ABORT")
    if flags == _ABORT:
        backend.abort()
    timeout = (backend.options if options is None else options)._timeout
    backend._shrinks += 1
    name = f"shrink/{backend._shrinks}/{'_'.join(map(str, remaining))}/"
    return type(backend)(dist.PrefixStore(name, backend._store), remaining.index(rank), len(remaining), timeout)


def new_token():
    """Returns text that no other process has."""
    return os.urandom(16).hex()


def handle(backend):
    """Returns this rank's name in `reconfigure`: its rank, which orders a set of handles, and its token."""
    return f"collectives:{backend.rank()}:{backend._token}"


def _order(text):
    """Returns the key by which a set of handles is sorted."""
    kind, _, rest = text.partition(":")
    rank, _, token = rest.partition(":")
    if kind != "collectives" or not rank.isascii() or not rank.isdigit() or not token or len(text) > 100:
        raise ValueError(f"reconfigure: {text[:100]!r} is no handle of this backend; pass what get_reconfigure_handle returns on each rank")
    return int(rank), token


def place(backend, handles):
    """Returns this rank's new rank, and how many ranks there are."""
    keys = [_order(text) for text in handles]
    ordered = list(handles) if isinstance(handles, list) else [text for _, text in sorted(zip(keys, handles))]
    if len(set(ordered)) != len(ordered):
        raise ValueError("reconfigure: a handle is listed twice; list each rank once")
    own = handle(backend)
    if own not in ordered:
        raise ValueError(f"reconfigure: this rank's handle {own!r} is not among the {len(ordered)} handles; ask for all handles again")
    return ordered.index(own), len(ordered)
