"""Durability and epochs, as pure state machines: positions in, decisions out; no I/O, no clock.

``watermarks`` says when a batch is acknowledged and when consumers see it, ``epoch_history`` where
two logs may differ, ``follower`` where they agree, ``lease`` which member may write.
"""
