"""For people: look into a store, check all of it, mend it."""
