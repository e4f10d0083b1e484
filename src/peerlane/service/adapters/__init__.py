"""Rewards for the trainers and environments of others: a module each, which imports its framework alone, and only when it is used."""
