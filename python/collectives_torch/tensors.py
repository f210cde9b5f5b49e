"""Tensors as memory that calls can use."""

import torch
from torch.distributed import ReduceOp

# The numbers that the Rust side knows types by.
_NUMBERS = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.uint8: 10,
    torch.uint16: 11,
    torch.uint32: 12,
    torch.uint64: 13,
    torch.bool: 14,
}
_BYTES = _NUMBERS[torch.uint8]
_OPS = {
    ReduceOp.SUM: 0,
    ReduceOp.PRODUCT: 1,
    ReduceOp.MIN: 2,
    ReduceOp.MAX: 3,
    ReduceOp.AVG: 4,
    ReduceOp.BAND: 5,
    ReduceOp.BOR: 6,
    ReduceOp.BXOR: 7,
    ReduceOp.PREMUL_SUM: 8,
}


def memory(tensor):
    """Where a contiguous tensor lies: its address, its bytes and its type's number. What is only moved may be of any type."""
    return (tensor.data_ptr(), tensor.nbytes, _NUMBERS.get(tensor.dtype, _BYTES))


def foldable(tensor, what):
    """A view of a tensor's elements that can be folded: complex numbers are pairs."""
    if tensor.dtype in _NUMBERS:
        return tensor
    if tensor.is_complex() and tensor.dtype != torch.complex32:
        return torch.view_as_real(tensor)
    raise RuntimeError(f"{what}: Invalid scalar type: tensors of {tensor.dtype} cannot be folded")


def reduction(op, tensor, what):
    """The op by its number, and its factor."""
    kind = op.op if isinstance(op, ReduceOp) else op
    number = _OPS.get(kind)
    if number is None:
        raise ValueError(f"{what}: there is no op {kind}")
    if tensor.is_complex() and kind not in (ReduceOp.SUM, ReduceOp.AVG):
        raise RuntimeError(f"{what}: {kind} is not defined for complex numbers")
    if tensor.is_floating_point() and kind in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        raise RuntimeError(f"{what}: Cannot use {kind} with non-integral dtype")
    factor = 1.0
    if kind == ReduceOp.PREMUL_SUM:
        factor = op.factor
        factor = float(factor.item() if isinstance(factor, torch.Tensor) else factor)
    return (number, factor)


class Memoryless(RuntimeError):
    """A tensor has elements and no memory."""


def check(tensor, what):
    """Refuses what does not lie in this process's memory, one element after another, or is more than its elements."""
    if not tensor.is_cpu:
        raise RuntimeError(
            f"{what}: the tensor lies on {tensor.device}, and the backend collectives serves CPU tensors; "
            'for both, init_process_group("cpu:collectives,cuda:nccl")'
        )
    if tensor.layout != torch.strided:
        raise RuntimeError(f"{what}: a tensor of layout {tensor.layout} has no memory of its own; only all_reduce takes sparse ones")
    if tensor.is_quantized:
        raise RuntimeError(f"{what}: a quantized tensor is more than its elements, whose scale would stay behind: pass its int_repr() and its scale")
    if tensor.is_nested:
        raise RuntimeError(f"{what}: a nested tensor is more than its elements, whose sizes would stay behind: pass its values() and its sizes")
    if not tensor.data_ptr() and tensor.nbytes:
        raise Memoryless(
            f"{what}: a {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory: its storage has been resized to 0, or it stands for other "
            "tensors (of a DTensor pass its to_local())"
        )


def check_target(tensor, what):
    """The same for a tensor that a call changes, whose elements each have a place."""
    check(tensor, what)
    if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
        raise RuntimeError(f"{what}: several elements of the tensor are one in memory: clone it first")


def single(tensors, what):
    """The one tensor of a list, which is yet to be checked."""
    if len(tensors) != 1:
        raise ValueError(f"{what}: requires a single-element tensor list, and this one has {len(tensors)}")
    return tensors[0]


def overlap(first, second):
    """Whether two contiguous tensors share memory."""
    start, end = first.data_ptr(), first.data_ptr() + first.nbytes
    return start < second.data_ptr() + second.nbytes and second.data_ptr() < end
