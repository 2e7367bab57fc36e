"""Simulation: the scheduler on modelled hardware, without computation."""
