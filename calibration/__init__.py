"""What a cluster costs: probes, link classes, fits and the saved profile."""
