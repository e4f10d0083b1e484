"""Attention on one rank, over a sequence in shards, and with shared heads."""
