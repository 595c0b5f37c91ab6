"""Trace records in RocketMQ's form, spans of OpenTelemetry."""
