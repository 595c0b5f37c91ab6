"""POP: members of a group receive messages from a queue together, each for a time. Pure."""
