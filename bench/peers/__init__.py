"""CometMQ beside Apache RocketMQ, NATS JetStream and Redis Streams: ``python -m bench peers``."""
