"""From messages to the application: listeners, order, what is sent back."""
