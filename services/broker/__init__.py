"""The writing member of a broker group. Read :mod:`services.broker.app` first: it puts the parts
together.
"""
