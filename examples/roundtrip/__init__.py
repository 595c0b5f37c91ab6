"""Every line of Python's standard library through a cluster and back: ``make run``.

``__main__`` conducts: a local cluster, traffic, a hand-over, a fail-over, a lag job, the verdict.
``worker`` is a producer or a consumer process; ``checker`` judges what they leave. ``failing``
plays one message that fails, and becomes a dead letter.
"""
