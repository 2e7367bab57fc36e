"""What each policy would bring on a machine that a buyer need not own."""
