"""Consumers that receive (POP): messages for a time, acknowledged one by one."""
