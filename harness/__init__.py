"""What a person runs: command line, launch, cluster in a box, scenarios, runs and tables."""
