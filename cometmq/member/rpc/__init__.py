"""The gRPC services of a member; no decision is made here."""
