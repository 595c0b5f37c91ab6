"""The lease of a broker group: where it is kept, its holder, the other members."""
