"""Where things are: routes, connections, and what comes over them."""
