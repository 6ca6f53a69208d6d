"""What a graph computes between an activation and its codes: found, probed, proved."""
