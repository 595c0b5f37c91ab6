"""The name server: the broker groups of each topic. Start with ``__main__``, then ``routes``."""
