"""Cost prediction: times of an iteration's stages, and of the whole iteration."""
