"""Programs that use CometMQ as an application would."""
