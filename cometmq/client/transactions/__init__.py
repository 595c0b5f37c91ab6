"""Half messages, how they end, and the brokers' questions about them."""
