"""The rules of messaging, pure; ``state`` ties them together: read that first.

Names, topics, generations, offsets, groups, pull, and the state that records them. No I/O, no
clock, no locks: plain objects that one task owns.
"""
