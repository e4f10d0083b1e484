"""Collectives of a group of ranks, one kernel each."""

from peerlane.device.collectives.communicator import Communicator, communicator

__all__ = ["Communicator", "communicator"]
