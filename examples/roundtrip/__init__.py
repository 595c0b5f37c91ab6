"""Every line of Python's standard library through a cluster and back: ``make run``.

``__main__`` conducts: a local cluster, traffic, a hand-over, a fail-over, a lag job, the verdict.
``worker`` is what the child processes do, ``process`` starts them; ``checker`` judges what they
leave. ``cases`` follows single messages through the fail-over, with ``stage`` for what they have in
common and ``timeline`` for what is reported of them.
"""
