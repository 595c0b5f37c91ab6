"""A following member of a broker group: every member is born as one. Read
:mod:`services.haslave.app` first: it puts the parts together.
"""
