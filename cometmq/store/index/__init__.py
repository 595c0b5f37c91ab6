"""The key index, built beside the log."""
