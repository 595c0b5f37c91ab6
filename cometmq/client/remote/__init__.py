"""What operators ask a running client: what it does now, and to consume a message."""
