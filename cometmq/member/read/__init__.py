"""What a member reads from its store for clients."""
