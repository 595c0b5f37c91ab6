"""Bytes: records, batches, properties, ids, tag hashes and consume-queue units. Pure functions;
``docs/format/`` has the specs."""
