"""Solutions between nodes: the kit inside a node, few large messages between nodes, and work on what is here while they travel."""
