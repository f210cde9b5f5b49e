"""The all-reduce of sparse tensors: gathers indices and values, and adds values with equal indices."""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from .work import EndedWork


def all_reduce(backend, tensor, opts):
    """Adds sparse tensors of one shape with any numbers of elements. Only sums are defined: absent elements are 0."""
    what = "ProcessGroup::allreduce"
    if opts.reduceOp != dist.ReduceOp.SUM:
        raise ValueError(f"{what}: unsupported reduction operation (allreduce of sparse tensors only works with ReduceOp.SUM)")
    mine = tensor.detach().coalesce()
    indices, values = mine.indices().contiguous(), mine.values().contiguous()
    counts = torch.empty(backend.size(), dtype=torch.int64)
    options = AllgatherOptions()
    options.asyncOp = False
    options.timeout = opts.timeout
    shape = torch.tensor([mine.sparse_dim(), mine.dense_dim(), *mine.shape], dtype=torch.int64)
    shapes = shape.new_empty((backend.size(), len(shape)))
    backend.all_gather_single(shapes, shape, options)
    if not bool((shapes == shape).all()):
        raise ValueError(f"{what}: sparse tensors of different shapes: {shapes.tolist()}")
    backend.all_gather_single(counts, torch.tensor([values.size(0)]), options)
    parts = []
    widest = int(counts.max())
    for part, fill in ((indices.t().contiguous(), 0), (values, 0)):
        padded = part.new_full((widest, *part.shape[1:]), fill)
        padded[: part.size(0)] = part
        everything = padded.new_empty((backend.size() * widest, *part.shape[1:]))
        backend.all_gather_single(everything, padded, options)
        kept = [everything[rank * widest : rank * widest + int(count)] for rank, count in enumerate(counts)]
        parts.append(torch.cat(kept))
    summed = torch.sparse_coo_tensor(parts[0].t(), parts[1], mine.shape).coalesce()
    with torch.no_grad():
        tensor.sparse_resize_and_clear_(summed.shape, summed.sparse_dim(), summed.dense_dim())
        tensor.copy_(summed)
    return EndedWork([tensor])
