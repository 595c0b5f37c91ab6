"""Durability and epochs, as pure state machines: positions in, decisions out; no I/O, no clock.

``watermarks`` says when a batch is acknowledged and when consumers see it, ``epochs`` names the
writer's incarnations, ``follower`` finds where two logs agree and keeps a copy in step, ``lease``
says who may write.
"""
