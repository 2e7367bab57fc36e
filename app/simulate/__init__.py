"""Predictions per policy for a machine that a buyer need not own."""
