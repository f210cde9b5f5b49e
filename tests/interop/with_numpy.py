"""Hands tensors of numpy's to the library whose path is given, and takes tensors from it: both ways, both structures."""

import ctypes
import gc
import sys

import numpy

library = ctypes.CDLL(sys.argv[1])
python = ctypes.pythonapi
python.PyCapsule_GetPointer.restype = ctypes.c_void_p
python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
python.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
python.PyCapsule_New.restype = ctypes.py_object
python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
FORMS = {"versioned": (b"dltensor_versioned", b"used_dltensor_versioned"), "legacy": (b"dltensor", b"used_dltensor")}


def hand_over(array, form):
    """What the library says to an array."""
    name, used = FORMS[form]
    capsule = array.__dlpack__(max_version=(1, 0)) if form == "versioned" else array.__dlpack__()
    take = getattr(library, f"add_one_{form}")
    take.argtypes = [ctypes.c_void_p]
    answer = take(python.PyCapsule_GetPointer(capsule, name))
    if answer >= 0:
        python.PyCapsule_SetName(capsule, used)
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
        return python.PyCapsule_New(make(), FORMS[self.form][0], None)


for form in FORMS:
    array = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
    references = sys.getrefcount(array)
    assert hand_over(array, form) == 0
    assert numpy.array_equal(array, numpy.arange(1, 13, dtype=numpy.float32).reshape(3, 4)), array
    assert hand_over(array[1:2, 1:3], form) == 0, "a part that lies row by row, at an offset"
    assert array[1].tolist() == [5, 7, 8, 8], array
    assert hand_over(array[:, ::2], form) == -1, "not row by row"
    assert hand_over(array.T, form) == -1, "columns first"
    assert hand_over(array.astype(numpy.complex64), form) == -1, "no type of the library's"
    assert hand_over(array.astype(numpy.int32), form) == 1, "another type than is asked for"
    assert hand_over(numpy.zeros((0, 5), dtype=numpy.float32), form) == 0
    gc.collect()
    assert sys.getrefcount(array) == references, "not given back exactly once"

    counting = numpy.from_dlpack(Counting(form))
    assert counting.dtype == numpy.int32 and counting.tolist() == [[0, 1, 2], [3, 4, 5]], counting
    part = counting[1]
    del counting
    gc.collect()
    assert part.tolist() == [3, 4, 5]
    del part
    gc.collect()

locked = numpy.ones(3, dtype=numpy.float32)
locked.flags.writeable = False
assert hand_over(locked, "versioned") == 1, "may not be written"
print("numpy", numpy.__version__, "agrees")
