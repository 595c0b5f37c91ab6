"""From a queue to messages: positions, pulls, waits at a pull-hold."""
