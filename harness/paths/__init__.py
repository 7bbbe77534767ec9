"""Other ways to do what a move does, to be measured beside it."""
