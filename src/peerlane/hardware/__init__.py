"""The machine: datasheet profiles, topology, environment record, measured ceilings, rooflines, and the doctor's checks.

Nothing here creates a CUDA context in the calling process; measuring happens in processes that :mod:`peerlane.hardware.measure` starts.
"""
