"""Which timers are due next: an index over the timer queue, made from it and made again at will."""
