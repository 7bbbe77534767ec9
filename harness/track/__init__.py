"""Tracking the latency of moves over commits: launches, their history, and verdicts upon them."""
