"""Members of a consumer group: which queues each has, their locks, how queues change hands."""
