"""Consumer groups: members, offsets, queue locks, resets."""
