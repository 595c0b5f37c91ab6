"""Routes of topics, and connections to brokers, name servers and pull-holds."""
