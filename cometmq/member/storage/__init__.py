"""What is appended: the log and its queues, the disk, who waits for both."""
