"""Looks at kernels and machines: mechanisms, lint of PTX, resources of a cubin, traces."""
