"""What this computer has, how much of its memory is used, and how long the stages take on it."""
