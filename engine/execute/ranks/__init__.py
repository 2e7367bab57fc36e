"""A model that is divided among processes: rank 0 plans, all execute."""
