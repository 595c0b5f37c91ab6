"""Groups that receive (POP): leases given, acknowledged, changed."""
