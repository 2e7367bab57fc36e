"""What an iteration will cost: the stages' times, and the iteration's from them."""
