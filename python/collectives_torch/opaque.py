"""Makes PyTorch's compiler leave the backend's calls alone, as it leaves C++ calls alone.

The compiler traces into all Python code that a compiled function calls. At a graph break, it also compiles the functions
that are called there. It knows few members of a group, and none of a work. So it must neither trace nor compile the
backend's functions.
"""

import inspect

from torch._C._dynamo import eval_frame

# Skips the function itself and everything that it calls.
_LEFT_ALONE = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def opaque(function):
    """Makes the compiler skip a function and everything that it calls."""
    function._torchdynamo_disable = True
    eval_frame.set_code_exec_strategy(function.__code__, _LEFT_ALONE)
    return function


def opaque_class(kind):
    """Makes the compiler skip the functions that a class defines."""
    for member in vars(kind).values():
        if inspect.isfunction(member):
            opaque(member)
    return kind
