"""Operating a cluster: :mod:`.ops` holds the functions, :mod:`.cli` the ``cometmq`` command."""
