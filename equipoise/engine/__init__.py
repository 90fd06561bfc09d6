"""The in-process engine: local training of stacked clients, evaluation and memory."""
