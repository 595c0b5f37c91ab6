"""Every line of Python's standard library through a cluster and back, byte for byte: ``make run``.

``sources`` finds the text files and splits them into lines, ``placing`` puts lines back in their
places, ``spool`` is how a consumer process hands lines over: all three are pure or touch plain
files only. ``producing`` and ``consuming`` are the two programs that talk to the cluster,
``traffic`` runs them, ``stage`` sets the cluster up.

While messages flow, ``handover`` changes a writer, ``takeover`` kills one, and ``lagging`` has one
backlog counted twice; ``duplicates`` tells why a line came more than once.
Afterwards ``comparing`` compares the files that came back, ``logs`` the logs of each broker group's
members; ``metrics`` looks at what the servers counted. ``job`` conducts, ``outcome`` judges,
``screen`` shows.
"""
