"""Runs: one training with one seed, and its directory."""
