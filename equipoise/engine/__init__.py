"""What happens inside a round: local training of stacked clients, evaluation, memory."""
