"""Messages that wait for their time: delay levels, timers, recalls."""
