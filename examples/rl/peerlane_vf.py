"""An environment for verifiers 0.4; see docs/rl.md for its command."""

from peerlane.service.adapters.verifiers import taskset_class

KernelTaskset = taskset_class()
__all__ = ["KernelTaskset"]
