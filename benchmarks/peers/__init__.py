"""One script per peer. Each runs a job and reports in the same format."""
