"""What every kernel of the kit stands on: groups of ranks, arenas, compilation, launches, declared kernels."""
