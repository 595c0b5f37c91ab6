"""gRPC plumbing, no business: servers, channels, errors on the wire, back-off."""
