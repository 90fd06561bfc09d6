"""One script per peer: each runs a job its own way and reports in the same words."""
