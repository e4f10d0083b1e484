"""Mixtures of experts: routing, rows to experts and back, and whole layers."""
