"""Suite `load`: what clients see as more and more requests come, at times that they choose themselves."""
