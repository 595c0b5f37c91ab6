"""Questions of operators to a running client: what it does now, and to consume a message."""
