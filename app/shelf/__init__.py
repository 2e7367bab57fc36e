"""The models on this computer: which there are, whether they fit, and the one that is loaded."""
