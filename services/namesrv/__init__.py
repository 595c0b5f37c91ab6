"""The name server: who serves which topic. Start with ``__main__``, read ``routes`` first."""
