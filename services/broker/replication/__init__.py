"""The copies of the log: followers, the in-sync set, the hand-over."""
