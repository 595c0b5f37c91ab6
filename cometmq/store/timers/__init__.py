"""The timer index: built from the timer queue, and rebuilt at will."""
