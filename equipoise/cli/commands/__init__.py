"""The commands, one module for each of them."""
