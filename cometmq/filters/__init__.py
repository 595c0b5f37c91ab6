"""Which messages a consumer wants: expressions and the predicates made of them. Pure; no I/O."""
