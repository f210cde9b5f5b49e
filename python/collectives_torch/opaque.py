"""What the compiler of PyTorch sees of the backend: calls that it leaves alone, as it leaves alone calls of C++.

It looks into all Python that a compiled function calls, and compiles what is called on its way out of one. Of a group it knows a few members,
and of a work nothing: so neither may happen here.
"""

import inspect

from torch._C._dynamo import eval_frame

# Neither the function itself, nor what it calls.
_LEFT_ALONE = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def opaque(function):
    """Has the compiler leave a function alone, and all that it calls."""
    function._torchdynamo_disable = True
    eval_frame.set_code_exec_strategy(function.__code__, _LEFT_ALONE)
    return function


def opaque_class(kind):
    """Has the compiler leave alone what a class defines."""
    for member in vars(kind).values():
        if inspect.isfunction(member):
            opaque(member)
    return kind
