"""From a producer's batch to the log."""
