"""The log: writing it, reading it in runs of records, what damage took out of it."""
