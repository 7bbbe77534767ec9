"""What to do: the price of a schedule, the choice per block and the thresholds."""
