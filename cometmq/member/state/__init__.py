"""The tables of a broker group in memory, and their records in the log."""
