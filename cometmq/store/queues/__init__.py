"""Consume queues, and the way from the log to them."""
