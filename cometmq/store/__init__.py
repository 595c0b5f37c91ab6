"""The storage engine: synchronous, one writer, bytes and offsets. Start reading at
:mod:`cometmq.store.writer`.
"""
