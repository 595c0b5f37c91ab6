"""After a stop: where the log ends, who wrote it, and the queues up to there."""
