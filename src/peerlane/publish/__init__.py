"""Publishes results: as a page, and as bundles of a run that others can verify."""
