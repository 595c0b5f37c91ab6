"""How fast CometMQ is, and how fast it could be at most: docs/benchmarks/method.md explains it.

``limits`` measures the denominators, ``produce``, ``consume`` and ``latency`` the system itself,
each as a program of its own; ``report`` turns their lines into medians and ratios.
"""
