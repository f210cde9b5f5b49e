"""Hands tensors of PyTorch's to the library whose path is given, and takes tensors from it: both ways, both structures."""

import ctypes
import gc
import sys

import torch
import torch.utils.dlpack

library = ctypes.CDLL(sys.argv[1])
api = ctypes.pythonapi
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
FORMS = {"versioned": b"dltensor_versioned", "legacy": b"dltensor"}
# A capsule keeps no copy of its name.
USED = {form: b"used_" + name for form, name in FORMS.items()}


def hand_over(tensor, form):
    """What the library says to a tensor."""
    capsule = tensor.__dlpack__(max_version=(1, 0)) if form == "versioned" else tensor.__dlpack__()
    take = getattr(library, f"add_one_{form}")
    take.argtypes = [ctypes.c_void_p]
    answer = take(api.PyCapsule_GetPointer(capsule, FORMS[form]))
    if answer >= 0:
        api.PyCapsule_SetName(capsule, USED[form])
    return answer


class Counting:
    """A tensor of the library's."""

    def __init__(self, form):
        self.form = form

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        make = getattr(library, f"counting_{self.form}")
        make.restype = ctypes.c_void_p
        return api.PyCapsule_New(make(), FORMS[self.form], None)


for form in FORMS:
    memory = bytearray(48)
    references = sys.getrefcount(memory)
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    assert hand_over(tensor, form) == 0
    assert tensor.tolist() == [1.0] * 12, tensor
    rows = tensor.view(3, 4)
    assert hand_over(rows[1], form) == 0, "a row, at an offset"
    assert rows.tolist() == [[1.0] * 4, [2.0] * 4, [1.0] * 4], rows
    assert hand_over(rows[:, ::2], form) == -1, "not row by row"
    assert hand_over(rows.T, form) == -1, "columns first"
    assert hand_over(rows.to(torch.complex64), form) == -1, "no type of the library's"
    assert hand_over(rows.to(torch.bfloat16), form) == 1, "another type than is asked for"
    assert hand_over(torch.zeros(0, 5), form) == 0
    del tensor, rows
    gc.collect()
    assert sys.getrefcount(memory) == references, "not given back exactly once"

    counting = torch.from_dlpack(Counting(form))
    assert counting.dtype == torch.int32 and counting.tolist() == [[0, 1, 2], [3, 4, 5]], counting
    part = counting[1]
    del counting
    gc.collect()
    part += 1
    assert part.tolist() == [4, 5, 6]
    del part
    gc.collect()

print("torch", torch.__version__, "agrees")
