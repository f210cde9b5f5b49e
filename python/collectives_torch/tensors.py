"""Tensors as memory that calls can use."""

import torch
from torch.distributed import ReduceOp

# The Rust side's numbers for types.
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
    """Returns a contiguous tensor's address, bytes and type number. Types without a number are moved as bytes."""
    return (tensor.data_ptr(), tensor.nbytes, _NUMBERS.get(tensor.dtype, _BYTES))


def foldable(tensor, what):
    """Returns a view of a tensor's elements that can be reduced. Complex numbers become pairs."""
    if tensor.dtype in _NUMBERS:
        return tensor
    if tensor.is_complex() and tensor.dtype != torch.complex32:
        return torch.view_as_real(tensor)
    raise RuntimeError(f"{what}: Invalid scalar type: tensors of {tensor.dtype} cannot be reduced")


def reduction(op, tensor, what):
    """Returns the number of the op, and its factor."""
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
    """A tensor has elements but no memory."""


def check(tensor, what):
    """Refuses tensors that are not dense, are not in CPU memory, or consist of more than their elements."""
    if not tensor.is_cpu:
        raise RuntimeError(
            f"{what}: the tensor is on {tensor.device}, but the backend collectives supports only CPU tensors; "
            'for both, call init_process_group("cpu:collectives,cuda:nccl")'
        )
    if tensor.layout != torch.strided:
        raise RuntimeError(f"{what}: a tensor of layout {tensor.layout} has no memory of its own; only all_reduce accepts sparse ones")
    if tensor.is_quantized:
        raise RuntimeError(f"{what}: a quantized tensor also has a scale, which would not be sent: pass its int_repr() and its scale")
    if tensor.is_nested:
        raise RuntimeError(f"{what}: a nested tensor also has sizes, which would not be sent: pass its values() and its sizes")
    if not tensor.data_ptr() and tensor.nbytes:
        raise Memoryless(
            f"{what}: a {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory: its storage has been resized to 0, or it wraps other "
            "tensors (for a DTensor, pass its to_local())"
        )


def check_target(tensor, what):
    """Checks a tensor that a call changes. Also refuses elements that share one place in memory."""
    check(tensor, what)
    if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
        raise RuntimeError(f"{what}: several elements of the tensor share memory: clone it first")


def single(tensors, what):
    """Returns the only tensor of a list, unchecked."""
    if len(tensors) != 1:
        raise ValueError(f"{what}: requires a single-element tensor list, and this one has {len(tensors)}")
    return tensors[0]


def overlap(first, second):
    """Whether two contiguous tensors share memory."""
    start, end = first.data_ptr(), first.data_ptr() + first.nbytes
    return start < second.data_ptr() + second.nbytes and second.data_ptr() < end
