"""Half messages: ends, checks, what operators do with them."""
