"""After a stop: where the log ends, which program wrote it, and the queues up to there."""
