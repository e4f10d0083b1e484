"""Modules that all rooms use: places and nodes of ranks, files, the version, words of messages. No torch here."""
