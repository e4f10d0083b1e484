"""Collectives of a group of ranks, one kernel each."""

from peerlane.device.collectives.communicator import Communicator, communicator, relative_parts

__all__ = ["Communicator", "communicator", "relative_parts"]
