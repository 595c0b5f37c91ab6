"""What every member of a broker group is: an open store, its flusher, its state, and the reads it
answers.

``services.broker`` adds what only the writer does. asyncio begins here; gRPC stays in the
``*servicer.py`` modules.
"""
