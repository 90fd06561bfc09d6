"""Runs: one training with one seed, and the directory it leaves behind."""
