"""The backend "collectives" for torch.distributed. PyTorch finds it by itself when the package is installed.

>>> import torch.distributed as dist
>>> dist.init_process_group("collectives")  # doctest: +SKIP

With TORCH_DEVICE_BACKEND_AUTOLOAD=0, a program must import this package first.

Most of the package is loaded with the first group, because every `import torch` imports this file. For the same reason,
no error may leave this file: `import torch` would fail.
"""

__all__ = ["CollectivesBackend", "CollectivesProcessGroup"]


def register():
    """Registers the backend. PyTorch calls this at the end of its own import, where only part of PyTorch is loaded."""
    import torch.distributed as dist

    if dist.is_available():
        dist.Backend.register_backend("collectives", _create, extended_api=True, devices=["cpu"])


def _create(options, backend_options=None):
    """Creates a group. PyTorch calls this."""
    return _loaded().create(options, backend_options)


def _loaded():
    import torch

    try:
        from . import process_group
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"the backend collectives cannot be loaded with PyTorch {torch.__version__}: {error}. It was tested with PyTorch 2.15. "
            "If the versions fit, build and install collectives-torch again"
        ) from error
    return process_group


def __getattr__(name):
    if name in __all__:
        return getattr(_loaded(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
