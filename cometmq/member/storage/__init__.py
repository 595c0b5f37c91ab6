"""What is appended: the log and its queues, the disk, what waits for both."""
