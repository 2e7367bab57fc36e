"""The browser page: a client of the REST API like any other."""
