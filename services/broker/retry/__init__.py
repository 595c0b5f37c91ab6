"""Messages that come again: sent back, dead letters, resends."""
