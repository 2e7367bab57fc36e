"""Profiling: hardware, memory budgets, and measured times of the stages."""
