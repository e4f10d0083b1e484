"""The entry point by which ``import torch`` learns of the backend ``peerlane``. It imports nothing of the package but this module."""

import sys
from typing import Any


def register() -> None:
    """Registers the backend. The code behind it is imported when the first group of it is created."""
    import torch.distributed as dist

    if dist.is_available() and "PEERLANE" not in dist.Backend._plugins:
        dist.Backend.register_backend("peerlane", _create_group, extended_api=True, devices=["cpu", "cuda"])


def _create_group(options: Any, backend_options: Any = None) -> Any:
    """Creates a group. PyTorch keeps the device that the caller bound it to in a variable of its own, and tells no backend."""
    from peerlane.device.backend.process_group import create_group

    return create_group(options, sys._getframe(1).f_locals.get("device_id"))
