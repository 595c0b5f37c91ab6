"""What happened to a message: trace records in RocketMQ's form, spans of OpenTelemetry."""
