"""Matrix products on one rank, and fused with the collectives around them."""
