"""The small files of a store's folder: whose it is, how it was left, what the disk has."""
